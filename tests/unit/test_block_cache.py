"""Large blocks are kept for the next call, and never more of them than were in use at one time."""

import gc
import os
import threading

import pytest
import torch

from deltamesh.models.layers import Linear, RMSNorm
from deltamesh.ops import gated_delta_rule
from deltamesh.ops.memory import BlockCache, _blocks, fresh

CPU = torch.device("cpu")
MIB = 1 << 20


def test_a_block_comes_back_when_its_last_reference_is_gone() -> None:
    cache = BlockCache()
    block = cache.take(MIB)
    place, view = block.data_ptr(), block[10:20]
    del block
    other = cache.take(MIB)
    assert other.data_ptr() != place, "a view still holds the first block"
    del view
    assert cache.take(MIB).data_ptr() == place


def test_idle_and_used_blocks_stay_under_the_most_ever_used() -> None:
    cache = BlockCache()
    small = [cache.take(MIB) for _ in range(4)]
    del small
    large = cache.take(3 * MIB)  # no small one fits; three of them make room for it
    assert cache.idle_bytes < 2 * MIB
    assert len(large) == 3 * MIB
    del large
    cache.take(MIB)
    assert cache.idle_bytes < 4 * MIB


def test_a_much_larger_block_is_not_spent_on_a_small_request() -> None:
    cache = BlockCache()
    large = cache.take(8 * MIB)
    place = large.data_ptr()
    del large
    assert cache.take(MIB).data_ptr() != place


def test_blocks_given_back_by_other_threads_are_reused() -> None:
    cache = BlockCache()
    held = [cache.take(MIB) for _ in range(8)]
    places = {b.data_ptr() for b in held}

    def drop() -> None:
        held.pop()

    threads = [threading.Thread(target=drop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {cache.take(MIB).data_ptr() for _ in range(8)} <= places


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_fresh_memory_has_the_shape_and_dtype_asked_for(dtype: torch.dtype) -> None:
    x = fresh((3, 5, 1 << 20), dtype, CPU)
    assert x.shape == (3, 5, 1 << 20)
    assert x.dtype == dtype
    assert x.is_contiguous()
    assert x.data_ptr() % 64 == 0
    assert x.fill_(1).sum(dtype=torch.float64).item() == x.numel()


def test_a_result_that_is_still_held_survives_later_calls() -> None:
    torch.manual_seed(0)
    shape = (1, 1500, 8, 128)  # results of 6 MB
    q, k, v = (torch.randn(shape) for _ in range(3))
    g, beta = -torch.rand(shape[:3]), torch.rand(shape[:3])
    first, _ = gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True)
    part, copy = first[0, 700:], first.clone()
    del first
    gc.collect()
    for _ in range(3):
        gated_delta_rule(q, k, 2 * v, g, beta, use_qk_l2norm=True)
    assert torch.equal(part, copy[0, 700:])


def test_fresh_memory_is_nan_under_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):  # new, then used before
            assert fresh((2 * MIB,), torch.float32, CPU).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_who_finds_the_cache_at_work_does_without_it() -> None:
    cache = BlockCache()
    held = cache.take(MIB)
    with cache._lock:
        other = cache.take(MIB)
    del other
    cache.take(MIB)
    del held
    assert cache.take(MIB).numel() == MIB
    assert cache._used > 0


def test_a_child_forked_while_the_cache_is_at_work_has_one_of_its_own() -> None:
    reading, writing = os.pipe()
    with _blocks()._lock:
        child = os.fork()
        if not child:
            fresh((2 * MIB,), torch.float32, CPU)
            os.write(writing, str(_blocks()._most_used).encode())
            os._exit(0)
    os.waitpid(child, 0)
    assert 8 * MIB <= int(os.read(reading, 100)) < 9 * MIB


@pytest.mark.parametrize("rows", [64, 4096])
def test_results_of_any_size_can_be_changed_in_place(rows: int) -> None:
    q, k, v = (torch.randn(1, rows, 8, 64, requires_grad=True) for _ in range(3))
    o, _ = gated_delta_rule(q, k, v, -torch.rand(1, rows, 8), torch.rand(1, rows, 8), use_qk_l2norm=True)
    o.mul_(2).sum().backward()
    assert q.grad is not None
    weight = torch.nn.Parameter(torch.randn(512, 512))
    x = torch.randn(rows, 512)
    for y in (Linear(weight)(x), RMSNorm(torch.nn.Parameter(torch.zeros(512)), 1e-6)(x)):
        y.add_(1).sum().backward()
