"""Contracts state how a call that communicates, or is opaque, places its results and gradients.

Nothing inside such a call is followed, so a contract is a declaration that can be compared with the
code that it is about.

- `collectives`: the operations of c10d and functional collectives.
- `logged_calls`: conversions of DTensors, and functions registered by the user.
- `opaque_calls`: kernels outside of torch, such as flash attention.
- `functions`: how ``autograd.Function``s hold the gradient of an input that is replicated along tp.
"""
