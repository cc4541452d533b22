"""How bytes travel between ranks. ``Channel`` chooses; nothing else calls a transport."""
