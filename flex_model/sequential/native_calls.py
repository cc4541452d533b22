"""Where a call may not be suspended: inside of C++ that has called Python by way of pybind11, which
keeps a list of its calls under way per thread and ends the process where they don't end in order.
"""

from __future__ import annotations

import functools
import mmap

import torch

from flex_model import _C

_MARK = b"pybind11_internals"  # in each library that is made with it


def hinderer(base: int) -> str:
    """The library in which such a call is under way; "" if there is none.

    Args:
        base: ``_C.stack_pointer()`` where what is to be suspended began.
    """
    # All functions that pybind11 makes in one library begin at one place; these two have others.
    begins_at = dict(map(_C.code_of, (torch._C._dispatch_tls_local_include_set, _C.flatten)))
    for file, function in _C.native_frames(base):
        if function == begins_at.get(file, function) and _is_made_with_pybind11(file):
            return file
    return ""


@functools.cache
def _is_made_with_pybind11(file: str) -> bool:
    try:
        with (
            open(file, "rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return content.find(_MARK) >= 0
    except (OSError, ValueError):  # no file: the kernel's own code
        return False
