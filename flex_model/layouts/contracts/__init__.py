"""What communicates, or is opaque: how it places its results, and gradients, by its contract.

Nothing inside a contract is followed, so each is a declaration that can be compared with the code
that it is about.

- `collectives`: the operations of c10d and functional collectives.
- `logged_calls`: conversions of DTensors, and functions registered by the user.
- `opaque_calls`: kernels that are no operations of torch, such as flash attention.
- `functions`: how ``autograd.Function``s hold the gradient of an input that is replicated along tp.
"""
