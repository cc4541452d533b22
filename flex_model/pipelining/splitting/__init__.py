"""Models split into the stages of a pipeline: by torch's tracer, or keeping their module tree."""
