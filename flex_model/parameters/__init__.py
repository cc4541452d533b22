"""Parameters: full ones and their gradients, trainable modules and their file."""
