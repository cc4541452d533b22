"""Runners: what runs a wrapped model, or the schedule of a pipeline, with hooks."""
