"""How bytes travel between ranks. ``Communicator`` chooses; nothing else calls a transport."""
