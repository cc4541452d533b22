"""The ways to compile a model, or its modules; by default with the backend "eager", which runs what
was captured as it is: capturing is what could lose hooks.
"""

import torch


def whole(model, backend="eager", **settings):
    return torch.compile(model, backend=backend, **settings)


def in_place(model, backend="eager", **settings):
    model.compile(backend=backend, **settings)
    return model


def modules(names):
    """Compile each of these modules."""

    def compile_them(model, **settings):
        for name in names:
            in_place(model.get_submodule(name), **settings)
        return model

    return compile_them


def forward(model, backend="eager", **settings):
    model.forward = torch.compile(model.forward, backend=backend, **settings)
    return model
