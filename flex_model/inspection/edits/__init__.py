"""Editing functions are called once on tensors without values, before a run: what is wrong with
them, and at which line.
"""
