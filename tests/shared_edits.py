"""Editing functions that many tests use."""

import torch

from models import random


def double(module, full, save_ctx, modules):
    return full * 2


def elementwise(module, full, save_ctx, modules):
    return full + 0.5 * full.sin()  # smooth, and as large as before: so are errors of rounding


def mixing(module, full, save_ctx, modules):
    """A dense product along every dim, so along the sharded one too."""
    for dim, size in enumerate(full.shape):
        mix = random(size, size, seed=20 + dim).to(full) * (0.3 / size**0.5)
        full = full + torch.tensordot(full, mix, ([dim], [0])).movedim(-1, dim)
    return full


def in_place(module, full, save_ctx, modules):
    """The last index of every dim: it lives on the last rank. Nothing is returned."""
    for dim in range(full.ndim):
        full.select(dim, -1).mul_(1.5).add_(0.25)


def mixing_ends(module, full, save_ctx, modules):
    """Every row and unit with the one at the other end."""
    return full + full.flip(0) / 2 + full.flip(-1) / 4


def mixing_units(module, full, save_ctx, modules):
    """Every unit with another, and with all of them."""
    return full.flip(-1) * 0.5 + full.mean(-1, keepdim=True)


def mixing_features(module, full, save_ctx, modules):
    """A dense product over the last dim, the one that tensor parallelism splits."""
    width = full.shape[-1]
    return full + 0.5 * full @ random(width, width, seed=3).to(full.dtype)


def mixing_rows(module, full, save_ctx, modules):
    """A dense product over the first dim, the one that data parallelism splits."""
    rows = full.shape[0]
    mix = random(rows, rows, seed=4).to(full.dtype)
    return full - 0.5 * (mix @ full.reshape(rows, -1)).reshape(full.shape)
