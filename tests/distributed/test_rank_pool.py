"""The pool of local ranks: worlds of every size from one set of processes, and failures that leave it usable."""

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from deltamesh.testing.rank_pool import RankPool, RanksFailed


def _rank_sum(x: int) -> int:
    total = torch.tensor(x + dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def _where() -> tuple[int, int, int, int]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), os.getpid()


def _echo(*args: object, **kwargs: object) -> tuple[object, object]:
    return args, kwargs


def _draw() -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    return torch.rand(3)


def _fail_on(bad: int) -> int:
    if dist.get_rank() == bad:
        raise ValueError(f"rank {bad} dislikes its input")
    return _rank_sum(0)


def _fail_everywhere() -> None:
    raise KeyError("the same on all")


def _fail_with_unpicklable() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("cannot travel")


def _return_unpicklable() -> object:
    return lambda: None


def _exit_on(bad: int) -> int:
    if dist.get_rank() == bad:
        os._exit(7)
    return _rank_sum(0)


def _hang_on(bad: int) -> int:
    if dist.get_rank() == bad:
        time.sleep(600)
    return dist.get_rank()


def _wait_for_a_message_that_nobody_sends() -> None:
    dist.recv(torch.zeros(1))


@pytest.fixture(scope="module")
def small_pool() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


def test_one_pool_serves_worlds_of_every_size_in_any_order(small_pool: RankPool) -> None:
    for world_size in (1, 3, 2, 3):
        expected = 10 * world_size + world_size * (world_size - 1) // 2
        assert small_pool.run(_rank_sum, world_size, 10) == [expected] * world_size


def test_results_come_back_by_rank_from_the_same_processes(small_pool: RankPool) -> None:
    first = small_pool.run(_where, 3)
    assert [place[:3] for place in first] == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]
    assert [place[3] for place in small_pool.run(_where, 3)] == [place[3] for place in first]
    assert os.getpid() not in {place[3] for place in first}


def test_only_as_many_processes_start_as_are_asked_for() -> None:
    with RankPool(64) as pool:
        pool.run(_where, 1)
        assert sum(worker is not None for worker in pool._workers) == 1


def test_arguments_and_tensors_travel_unchanged(small_pool: RankPool) -> None:
    x = torch.arange(5, dtype=torch.float64)
    (args, kwargs), _ = small_pool.run(_echo, 2, 1, x, name="n")
    assert args[0] == 1
    assert torch.equal(args[1], x)
    assert args[1].dtype == torch.float64
    assert kwargs == {"name": "n"}


def test_every_run_starts_from_the_same_random_state_and_dtype(small_pool: RankPool) -> None:
    first, second = small_pool.run(_draw, 2)
    again = small_pool.run(_draw, 1)[0]
    assert torch.equal(first, second)
    assert torch.equal(first, again)


def test_failure_of_one_rank_is_raised_with_its_remote_traceback(small_pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"_fail_on failed on ranks") as error:
        small_pool.run(_fail_on, 3, 1)
    text = str(error.value)
    assert "--- rank 1: ValueError: rank 1 dislikes its input" in text
    assert 'raise ValueError(f"rank {bad} dislikes its input")' in text
    assert text.index("--- rank 1") < text.index("--- rank 0"), "the cause stands before its consequences"
    assert isinstance(error.value.failures[1], ValueError)
    assert small_pool.run(_rank_sum, 3, 0) == [3, 3, 3]


def test_outcomes_keep_each_ranks_exception_as_a_value(small_pool: RankPool) -> None:
    outcomes = small_pool.outcomes(_fail_everywhere, 3)
    assert [type(outcome) for outcome in outcomes] == [KeyError] * 3
    assert [str(outcome) for outcome in outcomes] == ["'the same on all'"] * 3
    assert "in _fail_everywhere" in outcomes[0].__notes__[0]


def test_ranks_that_fail_at_once_keep_their_own_error_run_after_run(small_pool: RankPool) -> None:
    for _ in range(40):
        assert {str(outcome) for outcome in small_pool.outcomes(_fail_everywhere, 3)} == {"'the same on all'"}


def test_exception_or_result_that_cannot_be_pickled_is_described(small_pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="LocalError: cannot travel"):
        small_pool.run(_fail_with_unpicklable, 1)
    with pytest.raises(RanksFailed, match=r"[Cc]an't (get|pickle) local object"):
        small_pool.run(_return_unpicklable, 1)


def test_hang_names_the_ranks_and_their_stacks_and_leaves_the_pool_usable(small_pool: RankPool) -> None:
    before = small_pool.run(_where, 3)
    with pytest.raises(TimeoutError, match=r"_hang_on failed on ranks 1 of 3") as error:
        small_pool.run(_hang_on, 3, 1, timeout=1.5)
    assert "in _hang_on" in str(error.value)
    after = small_pool.run(_where, 3)
    assert [old[3] == new[3] for old, new in zip(before, after)] == [True, False, True]


def test_hang_inside_a_collective_is_ended_too(small_pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"failed on ranks 0, 1 of 2"):
        small_pool.run(_wait_for_a_message_that_nobody_sends, 2, timeout=1.5)
    assert time.monotonic() - start < 15
    assert small_pool.run(_rank_sum, 2, 0) == [1, 1]


def test_process_that_dies_is_reported_and_replaced(small_pool: RankPool) -> None:
    outcomes = small_pool.outcomes(_exit_on, 3, 2)
    assert "rank 2 ended with exit code 7" in str(outcomes[2])
    assert small_pool.run(_rank_sum, 3, 0) == [3, 3, 3]


def test_world_larger_than_the_pool_is_refused(small_pool: RankPool) -> None:
    with pytest.raises(ValueError, match=r"world_size=4 does not fit in a pool of 3; use 1\.\.3"):
        small_pool.run(_where, 4)
    with pytest.raises(ValueError, match=r"size=0 is not positive"):
        RankPool(0)


def test_environment_of_the_caller_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with RankPool(1) as pool:
        assert pool.run(_where, 1)[0][2] == 1
    assert os.environ["OMP_NUM_THREADS"] == "5"
    assert "MKL_NUM_THREADS" not in os.environ
