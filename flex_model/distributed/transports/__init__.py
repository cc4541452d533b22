"""Moves bytes between ranks. Only ``Communicator`` chooses and calls a transport."""
