"""Any bytes for a parser: what they mean, or ValueError; never another error, or a crash."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flex_model.distributed.failure import RankState
from flex_model.distributed.header import DTYPES, KINDS, MAX_DIMS, Header

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("plan_codes.cpp")
FLAGS = ["-std=c++17", "-O1", "-g", f"-I{ROOT / 'csrc'}", "-fno-sanitize-recover=all"]
RUNS = 300_000

words = st.integers(0, 2**63 - 1)
headers = st.builds(
    Header,
    kind=st.sampled_from(KINDS),
    site=words,
    state=st.sampled_from(RankState),
    sequence=words,
    seed=words,
    dtype=st.sampled_from([None, *DTYPES]),
    shape=st.lists(st.integers(0, 2**31 - 1), max_size=MAX_DIMS).map(tuple),
    flags=st.sampled_from([0, Header.CONSUMED, Header.NEEDS_GRADIENT]),
    microbatch=st.integers(0, 2**16 - 1),
)


def packed(value):
    return value.pack(value.sequence, value.state)


@settings(deadline=None, max_examples=500)
@given(headers)
def test_a_header_says_what_was_put_in(value):
    assert len(packed(value)) == 64
    assert Header.unpack(packed(value)) == value


@settings(deadline=None, max_examples=2000)
@given(headers, st.lists(st.tuples(st.integers(0, 63), st.integers(0, 255)), max_size=4))
@example(Header("forward"), [(6, 0xF0)])
def test_any_changed_header_is_read_as_it_is_or_refused(value, changes):
    data = bytearray(packed(value))
    for at, byte in changes:
        data[at] = byte
    try:
        read = Header.unpack(bytes(data))
    except ValueError:
        assert bytes(data) != packed(value)
        return
    assert packed(read) == bytes(data)


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=80))
def test_other_bytes_are_no_header(data):
    with pytest.raises(ValueError, match="header"):
        Header.unpack(data)


@settings(deadline=None, max_examples=500)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 8), max_size=24))
@example([1, 4, 4, 3, *[0, 0, 0, 0, 1, 2**61, 0, 0] * 2, 0, 0, 0, 4, 0])
def test_ops_take_no_numbers_that_are_no_plan(code):
    """The example has endless steps of nothing."""
    full, shard = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    try:
        whole = torch.ops.flex_model.assemble(shard, [0], code, [4], torch.uint8)
        part = torch.ops.flex_model.split(full, code, 0, [4])
    except (RuntimeError, ValueError):
        return
    assert (whole.shape, part.shape) == ((4,), (4,))


def build(compiler, program, *flags):
    command = [compiler, *FLAGS, *flags, str(SOURCE), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr or "unsupported" in built.stderr:
        pytest.skip(f"{compiler} has no such sanitizer")
    assert built.returncode == 0, built.stderr


def run(*command, cwd):
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=60, cwd=cwd
    )


@pytest.mark.slow
def test_codes_of_plans_that_are_changed_at_random(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    build(compiler, tmp_path / "plan_codes", "-fsanitize=address,undefined")
    ran = run(tmp_path / "plan_codes", 1, RUNS, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert RUNS / 20 < int(ran.stdout) < RUNS / 2, "of these were plans"
