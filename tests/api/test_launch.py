"""Starting local ranks: the environment they find, what they return, and how their errors reach the user."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from deltamesh.distributed.collectives import all_reduce
from deltamesh.distributed.launch import (
    WorkerFailed,
    init_worker,
    is_worker,
    launch,
    shutdown,
    threads_per_process,
)
from deltamesh.distributed.mesh import build_mesh
from deltamesh.topology import Topology

# The pool's fork server has imported everything, and processes of `launch` come from the same one.
pytestmark = pytest.mark.usefixtures("rank_pool")


def _sum_of_ranks(x: float) -> tuple[int, float, torch.device]:
    device = init_worker(device="cpu")
    mesh = build_mesh(Topology(cp=2))
    total = float(all_reduce(torch.tensor(x + mesh.world.rank), mesh.cp))
    shutdown()
    return mesh.world.rank, total, device


def _environment() -> tuple[dict[str, str], int]:
    return dict(os.environ), torch.get_num_threads()


def _fail(bad: int) -> None:
    init_worker(device="cpu")
    mesh = build_mesh(Topology(dp=3))
    if mesh.world.rank == bad:
        raise ValueError("this rank dislikes its input")
    all_reduce(torch.ones(1), mesh.world)


def _die(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(600)


def _exit(status: int) -> None:
    sys.exit(status)


def test_launched_ranks_form_a_world_and_return_results_by_rank() -> None:
    cpu = torch.device("cpu")
    assert launch(_sum_of_ranks, 0.5, processes=2) == [(0, 2.0, cpu), (1, 2.0, cpu)]


def test_launched_ranks_find_torchruns_variables_and_their_share_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("DELTAMESH_TENSOR_PARALLEL_SIZE", "2")
    before = dict(os.environ)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    answers = launch(_environment, processes=2)
    for rank, (environ, threads) in enumerate(answers):
        assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert environ["DELTAMESH_TENSOR_PARALLEL_SIZE"] == "2"
        assert threads == threads_per_process(2)
        assert is_worker(environ)
    assert dict(os.environ) == before, "the launcher's own environment is left alone"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_threads_are_shared_between_processes_unless_the_user_chose() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_process(1, {}) == cores
    assert threads_per_process(10 * cores, {}) == 1
    assert threads_per_process(4, {"OMP_NUM_THREADS": "3"}) == 3


def test_first_failure_is_raised_with_its_traceback_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerFailed) as error:
        launch(_fail, 1, processes=3)
    assert error.value.rank == 1
    assert error.value.exit_code == 1
    assert str(error.value).startswith("rank 1 failed: ValueError: this rank dislikes its input\n")
    assert "in _fail" in str(error.value)
    printed = capfd.readouterr()
    assert printed.err == ""
    assert printed.out == ""


def _lose_a_peer() -> None:
    init_worker(device="cpu")
    mesh = build_mesh(Topology(dp=2))
    if mesh.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(100):  # until the peer is gone
        all_reduce(torch.ones(1), mesh.world)
        time.sleep(0.1)


def test_a_killed_rank_is_blamed_and_not_only_the_peer_that_lost_it() -> None:
    """Which of the two the agent notices first is a matter of milliseconds."""
    with pytest.raises(WorkerFailed, match=r"ended by SIGKILL|lost a peer that left no error") as error:
        launch(_lose_a_peer, processes=2)
    assert ("SIGKILL" in str(error.value)) == (error.value.rank == 1)


def test_killed_rank_is_reported_by_its_signal() -> None:
    with pytest.raises(WorkerFailed, match="ended by SIGKILL; the system may have run out of memory") as error:
        launch(_die, signal.SIGKILL, processes=2)
    assert error.value.exit_code == 128 + signal.SIGKILL


def test_exit_status_of_a_rank_is_kept() -> None:
    with pytest.raises(WorkerFailed, match="exit status 3") as error:
        launch(_exit, 3, processes=1)
    assert error.value.exit_code == 3
    assert launch(_exit, 0, processes=1) == [None]


def test_launch_refuses_no_processes_and_launching_from_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"processes=0 is not positive; give the number of ranks, dp \* cp \* tp"):
        launch(_environment, processes=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeError, match="called on a rank"):
        launch(_environment, processes=1)


def test_worker_is_recognised_by_rank_and_world_size_together() -> None:
    assert not is_worker({})
    assert is_worker({"RANK": "0", "WORLD_SIZE": "1"})
    with pytest.raises(RuntimeError, match="WORLD_SIZE is not set in the environment but the other"):
        is_worker({"RANK": "0"})


def test_init_worker_outside_a_rank_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match="this process is no rank; start it with torchrun"):
        init_worker()


def test_rank_without_a_cuda_device_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"RANK": "99", "WORLD_SIZE": "100", "LOCAL_RANK": "99"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(RuntimeError, match=r"LOCAL_RANK=99, but this host has \d+ CUDA devices; start fewer ranks"):
        init_worker(device="cuda")


SCRIPT = """
import time
from deltamesh.distributed.launch import init_worker, launch, shutdown

def work():
    import torch, torch.distributed as dist
    init_worker(device="cpu")
    print("rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)
    shutdown()

def wait():
    print("waiting", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    import sys
    work() if sys.argv[1] == "work" else launch(wait, processes=2)
"""


def test_same_entry_works_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), "work"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_interrupt_ends_every_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["waiting\n"] * 2
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1, "the launcher's own; the ranks end silently"
    assert _session_ends_within(process.pid, seconds=20)


def test_killed_launcher_leaves_no_ranks_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), "wait"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["waiting\n"] * 2
    process.kill()
    process.communicate(timeout=60)  # returns once no process holds the pipe
    assert _session_ends_within(process.pid, seconds=20)


def _session_ends_within(group: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
