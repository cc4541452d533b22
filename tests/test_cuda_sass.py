"""What nvcc makes of the kernels stays as fast as it is: no GPU is needed."""

import functools
import re

import pytest

from tests.cuda import sass

pytestmark = pytest.mark.skipif(sass.find_tools() is None, reason="no nvcc or no nvdisasm")
REGISTERS, THREADS = 65536, 128  # of a multiprocessor; of a block


@functools.cache
def copies_on(architecture):
    found = [k for k in sass.kernels(architecture) if k.name.startswith("copy_")]
    # Batches; after a barrier or not; hinted or not; widths of chunks, of windows.
    assert len(found) == 2 * 2 * 2 * (5 + 3)
    return found


@pytest.fixture
def copies():
    return [kernel for kernel in copies_on("sm_90") if "AfterBarrier" not in kernel.name]


def blocks_at_once(name):
    text = (sass.ROOT / "csrc" / "cuda" / "box_copy_kernels.cuh").read_text()
    return int(re.search(rf"\b{name} = (\d+)", text)[1])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_all_blocks_of_a_full_grid_run_at_once(architecture):
    """A grid has so many; a block that has to wait for another one would run alone at the end. And
    no register is spilled for that.
    """
    if architecture not in sass.architectures():
        pytest.skip("nvcc does not know it")
    for kernel in copies_on(architecture):
        blocks = blocks_at_once("kWindowBlocks" if "windows" in kernel.name else "kChunkBlocks")
        allocated = -(-kernel.registers // 8) * 8  # in units of 8 per thread
        assert blocks * THREADS * allocated <= REGISTERS, kernel.name
        assert kernel.spilled == 0, kernel.name


BITS = {"uint4": "128", "uint2": "64", "unsigned int": "32", "unsigned short": "16"}


def test_accesses_are_as_wide_as_chunks(copies):
    """And only those of large copies leave the cache first, as a window's loads never do."""
    for kernel in copies:
        unit, streams = re.match(r"\w+<([\w ]+), (\w+),", kernel.name).groups()
        hint = " EF" if streams == "true" else ""
        if kernel.name.startswith("copy_chunks"):
            bits = BITS.get(unit, "8") + hint
            assert (kernel.loads, kernel.stores) == ([bits] * 4, [bits] * 4), kernel.name
        else:
            assert kernel.loads == ["128"] * 8, kernel.name
            assert kernel.stores.count("128" + hint) == 4, kernel.name
            assert len(set(kernel.stores)) == 2, kernel.name


def test_loads_see_what_peers_wrote(copies):
    """None goes through the cache of constants, which is not coherent."""
    for kernel in copies:
        loads = [i for i in kernel.instructions if sass.is_load(i)]
        assert not any("CONSTANT" in load for load in loads), kernel.name


def test_all_loads_of_a_thread_come_before_its_stores(copies):
    for kernel in copies:
        is_store = [sass.is_store(i) for i in kernel.instructions if sass.is_access(i)]
        assert is_store == sorted(is_store), kernel.name


def test_instructions(copies):
    """The copy of 64 bytes: all that comes before its accesses and between them. A division per
    piece instead of one per thread makes `size` 504.
    """
    for kernel in copies:
        is_chunks = kernel.name.startswith("copy_chunks")
        assert kernel.path <= (145 if is_chunks else 345), kernel.name
        assert kernel.size <= (320 if is_chunks else 820), kernel.name


def test_a_barrier_costs_copies_nothing_else(copies):
    """It is over before their first access, so they need no more registers."""
    alone = {kernel.name: kernel for kernel in copies}
    for kernel in copies_on("sm_90"):
        if "AfterBarrier" in kernel.name:
            copy = alone[re.sub(r"AfterBarrier<(.*?> ?)>", r"\1", kernel.name).replace("  ", " ")]
            assert kernel.registers <= copy.registers, kernel.name
            assert kernel.size <= copy.size + 80, kernel.name
            waits = [i for i, text in enumerate(kernel.instructions) if "BAR.SYNC" in text]
            flags = len(kernel.loads) - len(copy.loads) + len(kernel.stores) - len(copy.stores)
            accesses = [i for i, text in enumerate(kernel.instructions) if sass.is_access(text)]
            after = [i for i in accesses if i > waits[0]]
            assert (len(waits), flags) == (1, 6), kernel.name
            assert len(after) >= len(copy.loads) + len(copy.stores), kernel.name
