"""The header of 64 bytes that ranks exchange before a transfer, and at the end of a run.

Layout, eight little-endian int64 words:

====  =====================================================================
0     from high to low: 2 bits unused, magic 16, state 4, kind 8, dtype 8,
      ndim 4, flags 6, micro-batch 16
1     number of the FlexModel (high 32 bits) and of the exchange in it
2     site: hash of kind, module name, tensor index and hook number
3     random seed of the run (rank 0's counts)
4-7   up to eight sizes, 32 bits each; word 7 is a hash of the values of a
      tensor that should be equal on all ranks, with up to six dims
====  =====================================================================
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

_WORDS = struct.Struct("<8q")
MAX_DIMS = 8
MAX_HASHED_DIMS = 6
_MAGIC = 0x464D  # fits 15 bits, so that word 0 stays positive

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
        first, *sizes = _words(
            state, self.kind, self.dtype, self.shape, self.flags | flags, self.microbatch
        )
        if self.hash is not None:
            sizes[3] = self.hash
        return _WORDS.pack(first, sequence, self.site ^ mark, self.seed, *sizes)

    @staticmethod
    def unpack(packed: bytes) -> Header:
        if len(packed) != _WORDS.size:
            raise ValueError(f"a header has {_WORDS.size} bytes; got {len(packed)}")
        words = _WORDS.unpack(packed)
        first = words[0]
        values = []
        for bits in (16, 6, 4, 8, 8, 4):
            values.append(first & (1 << bits) - 1)
            first >>= bits
        if first != _MAGIC:
            raise ValueError(
                f"not a header of flex_model: first word {words[0]:#x}; do all ranks run the same "
                "version?"
            )
        microbatch, flags, ndim, dtype, kind, state = values
        hashed = words[7] if flags & Header.HASHED else None
        of_sizes = words[4:] if hashed is None else (*words[4:7], 0)
        sizes = [half for word in of_sizes for half in (word >> 32, word & 0xFFFFFFFF)]
        if (
            state >= len(RankState)
            or kind >= len(KINDS)
            or (dtype != 255 and dtype >= len(DTYPES))
            or ndim > MAX_DIMS
            or not all(0 <= size < 2**31 for size in sizes)
            or any(sizes[ndim:])
        ):
            raise ValueError(
                f"a header that this version of flex_model can't read: {packed.hex()}; do all "
                "ranks run the same version, of flex_model and of torch?"
            )
        return Header(
            kind=KINDS[kind],
            site=words[2],
            state=state,
            sequence=words[1],
            seed=words[3],
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
        if local[2] & Header.WIDE:  # the flags are bits 16 to 21 of the first word
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
def _words(
    state: int,
    kind: str,
    dtype: torch.dtype | None,
    shape: tuple[int, ...],
    flags: int,
    microbatch: int,
) -> tuple[int, ...]:
    """Pack words 0 and 4 to 7."""
    if len(shape) > MAX_DIMS or any(size >= 2**31 for size in shape):
        shape, flags = (), flags | Header.WIDE
    first = _MAGIC
    for value, bits in (
        (state, 4),
        (_CODE_OF_KIND[kind], 8),
        (255 if dtype is None else _CODE_OF_DTYPE[dtype], 8),
        (len(shape), 4),
        (flags, 6),
        (microbatch, 16),
    ):
        first = first << bits | value
    sizes = list(shape) + [0] * (MAX_DIMS - len(shape))
    return first, *(sizes[i] << 32 | sizes[i + 1] for i in range(0, MAX_DIMS, 2))
