"""Weights of a sequential run: where they are read from, and how they are loaded per target."""
