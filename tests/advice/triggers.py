"""What the rows have in common: a wrapped MLP, a hook, a folder."""

import functools
import tempfile
from pathlib import Path

import pytest

import models
from flex_model import FlexModel

BATCH = models.random(4, 6)


def in_a_folder(function):
    """Give it an empty folder of its own as first argument."""

    @functools.wraps(function)
    def with_folder(*args, **kwargs):
        pytest.importorskip("safetensors")
        with tempfile.TemporaryDirectory() as folder:
            return function(Path(folder), *args, **kwargs)

    return with_folder


def wrapped(*functions, model=None, **settings):
    flex = FlexModel(models.mlp() if model is None else model, {}, **settings)
    for function in functions:
        flex.register_forward_hook(function)
    return flex


def run(*functions, batch=BATCH, **settings):
    flex = wrapped(*functions, **settings)
    flex(batch)
    return flex
