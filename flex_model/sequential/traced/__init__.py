"""A model as a list of `torch.fx` subgraphs, one per target: for models that can be traced."""
