"""The header of 64 bytes that ranks exchange before a transfer, and at the end of a run.

Layout, little-endian:

=====  ====================================================================
bytes
0-7    magic (2), micro-batch (2), kind, dtype, flags, 16 x state + ndim
8-15   number of the FlexModel (high 32 bits) and of the exchange in it
16-23  site: hash of kind, module name, tensor index and hook number
24-31  random seed of the run (rank 0's counts)
32-63  up to eight sizes of 4; the last 8 are a hash of the values of a
       tensor that should be equal on all ranks, with up to six dims
=====  ====================================================================
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from flex_model.distributed.failure import OK, RankState

_HEAD, _CALL, _SIZES, _HASH = map(struct.Struct, ("<HHBBBB", "<qqq", "<8I", "<q"))
_ALL = struct.Struct("<HHBBBBqqq8I")
MAX_DIMS = 8
MAX_HASHED_DIMS = 6
_MAGIC = 0x464D

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    key=lambda dtype: str(dtype),
)
_CODE_OF_DTYPE = {dtype: code for code, dtype in enumerate(DTYPES)}

KINDS = (
    "registered hooks",
    "inputs",
    "forward",
    "forward_pre",
    "full_backward",
    "full_backward_pre",
    "tensor",
    "gradient of an edit",
    "result of an edit on rank 0",
    "end of the run",
    "end of the backward",
    "parameter",
    "trainable module",
    "described values",
    "result of an edit",
)
_CODE_OF_KIND = {kind: code for code, kind in enumerate(KINDS)}


def site_hash(*parts: object) -> int:
    """A hash of 63 bits that identifies a site in headers."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@lru_cache(maxsize=256)
def sites_hash(*parts: Hashable) -> int:
    """Return ``site_hash``, cached, for parts that repeat from run to run: ints, or tuples of
    dtypes and sizes, which have equal texts if they are equal.
    """
    return site_hash(*parts)


@dataclass(slots=True)  # not frozen, which makes it slow to make: every call of a hook makes one
class Header:
    """The operation that a rank is about to do."""

    kind: str
    site: int = 0
    state: int = OK
    sequence: int = 0
    seed: int = 0
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    flags: int = 0
    microbatch: int = 0
    hash: int | None = None  # 63 bits

    SEED: ClassVar[tuple[int, int]] = (24, 32)  # its bytes, which only rank 0 needs
    WIDE: ClassVar[int] = 1  # the sizes don't fit: they are exchanged separately
    CONSUMED: ClassVar[int] = 2  # an edit drew random numbers
    NEEDS_GRADIENT: ClassVar[int] = 4  # autograd records the transfer here
    EDITED: ClassVar[int] = 8  # the edit before this changed its tensor
    HASHED: ClassVar[int] = 16  # the last word is a hash
    CARRIES: ClassVar[int] = 32  # this rank's shard is behind it, in the same message

    def pack(self, sequence: int, state: int, flags: int = 0, mark: int = 0) -> bytes:
        """Pack the header with a sequence number, a state and further flags; ``mark``: bits that
        distinguish its site.
        """
        if self.hash is not None:
            flags |= Header.HASHED
        head, sizes = _head_and_sizes(
            state, self.kind, self.dtype, self.shape, self.flags | flags, self.microbatch
        )
        if self.hash is not None:
            sizes = sizes[: -_HASH.size] + _HASH.pack(self.hash)
        return head + _CALL.pack(sequence, self.site ^ mark, self.seed) + sizes

    @staticmethod
    def unpack(packed: bytes) -> Header:
        if len(packed) != _ALL.size:
            raise ValueError(f"a header has {_ALL.size} bytes; got {len(packed)}")
        magic, microbatch, kind, dtype, flags, state_and_ndim, *words = _ALL.unpack(packed)
        if magic != _MAGIC:
            raise ValueError(
                f"not a header of flex_model: it begins with {packed[:8].hex()}; do all ranks run "
                "the same version?"
            )
        sequence, site, seed, *sizes = words
        state, ndim = divmod(state_and_ndim, 16)
        hashed = None
        if flags & Header.HASHED:
            sizes = sizes[:MAX_HASHED_DIMS]
            (hashed,) = _HASH.unpack(packed[-_HASH.size :])
        if (
            state >= len(RankState)
            or kind >= len(KINDS)
            or (dtype != 255 and dtype >= len(DTYPES))
            or ndim > len(sizes)
            or not all(size < 2**31 for size in sizes)
            or any(sizes[ndim:])
        ):
            raise ValueError(
                f"a header that this version of flex_model can't read: {packed.hex()}; do all "
                "ranks run the same version, of flex_model and of torch?"
            )
        return Header(
            kind=KINDS[kind],
            site=site,
            state=state,
            sequence=sequence,
            seed=seed,
            dtype=None if dtype == 255 else DTYPES[dtype],
            shape=tuple(sizes[:ndim]),
            flags=flags & ~Header.HASHED,
            microbatch=microbatch,
            hash=hashed,
        )

    @staticmethod
    def seed_if_alike(rows: list[bytes], local: bytes) -> int | None:
        """Return rank 0's seed if all headers are complete and equal except for their seeds; None
        otherwise. Cheaper than unpacking them all.
        """
        if local[6] & Header.WIDE:  # its flags
            return None
        for row in rows:
            if row[:24] != local[:24] or row[32:] != local[32:]:
                return None
        return int.from_bytes(rows[0][24:32], "little")

    def of_call(self, seed: int, hash: int | None) -> Header:
        """Set what differs from call to call of one hook; return the header."""
        self.seed, self.hash = seed, hash
        return self

    @property
    def is_wide(self) -> bool:
        return bool(self.flags & Header.WIDE)


@lru_cache(maxsize=1024)
def _head_and_sizes(
    state: int,
    kind: str,
    dtype: torch.dtype | None,
    shape: tuple[int, ...],
    flags: int,
    microbatch: int,
) -> tuple[bytes, bytes]:
    """Pack what comes before and after what differs from call to call."""
    if len(shape) > MAX_DIMS or any(size >= 2**31 for size in shape):
        shape, flags = (), flags | Header.WIDE
    codes = _CODE_OF_KIND[kind], 255 if dtype is None else _CODE_OF_DTYPE[dtype]
    head = _HEAD.pack(_MAGIC, microbatch, *codes, flags, 16 * state + len(shape))
    return head, _SIZES.pack(*shape, *[0] * (MAX_DIMS - len(shape)))
