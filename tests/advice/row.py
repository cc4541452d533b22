"""A row: an error, and what its message advises."""

import functools
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import models
from flex_model import FlexModel

BATCH = models.random(4, 6)


@dataclass(frozen=True)
class Row:
    """What raises, a part of its message as the source has it, and what the message advises."""

    says: str
    trigger: Callable
    follow: Callable

    def check(self):
        with pytest.raises(Exception, match=re.escape(self.says).replace(r"\{\}", ".*")):
            self.trigger()
        self.follow()


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


def double(module, full, save_ctx, modules):
    return full * 2
