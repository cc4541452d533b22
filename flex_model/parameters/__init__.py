"""Full parameters and gradients, trainable modules, and their checkpoints."""
