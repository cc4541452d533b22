"""A cluster in one process: the product's own code, over simulated time, stores and links."""
