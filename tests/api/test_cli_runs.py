"""Commands on real ranks: what a run leaves behind, and that several processes give what one gives."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftConfig
from safetensors.numpy import load_file

from deltamesh.cli import main, probe, verify
from deltamesh.cli.errors import CommandError
from deltamesh.cli.probe_steps import ProbeResult, largest_difference
from deltamesh.cli.progress import clock
from deltamesh.cli.ranks import on_ranks, rank_here
from deltamesh.cli.run_directory import read_metrics
from deltamesh.testing import verification
from deltamesh.testing.equivalence import Deviation
from deltamesh.testing.verification import matrix
from deltamesh.topology import Topology

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _write(folder: Path, weight: float = 1.0, **settings: Any) -> Path:
    """A configuration with a data file of four groups, and five steps in more than one epoch."""
    lines = [
        {"prompt": f"{i} + {i} =", "completions": [{"text": f" {2 * i}", "weight": weight}, f" {2 * i} maybe"]}
        for i in range(4)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {
        "run_directory": str(folder / "run"),
        "data": {"path": str(folder / "data.jsonl"), "items_per_step": 3},
        "steps": 5,
        "optimizer": {"learning_rate": 1e-3},
        **settings,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


# ---------------------------------------------------------------- train


def test_four_processes_train_as_one_and_leave_a_whole_run_directory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = str(_write(tmp_path))
    assert main(["train", config, "--topology.cp", "2", "--topology.tp", "2"]) == 0
    shown = capfd.readouterr().out
    assert shown.count("step ") == 5, shown
    assert "step 5/5  loss " in shown
    assert "eta 0:00" in shown
    alone = tmp_path / "alone"
    assert main(["train", config, "--run_directory", str(alone)]) == 0

    run = tmp_path / "run"
    assert sorted(file.name for file in run.iterdir()) == ["adapter", "config.yaml", "metrics.jsonl"]
    records, expected = read_metrics(run), read_metrics(alone)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["epoch"] for record in records] == [0, 0, 1, 1, 2]
    for record, other in zip(records, expected, strict=True):
        assert record["topology"] == "dp=1 cp=2 tp=2"
        assert record["rows"] < record["tokens"]
        assert record["sharing"] == record["tokens"] / record["rows"]
        for name in ("loss_sum", "loss_per_token", "grad_norm", "tokens", "loss_tokens", "rows", "skipped"):
            assert record[name] == pytest.approx(other[name], rel=2e-5), name
    written, single = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (run, alone))
    assert written.keys() == single.keys()
    for name, factor in written.items():
        np.testing.assert_allclose(factor, single[name], rtol=2e-2, atol=1e-5, err_msg=name)
    assert PeftConfig.from_pretrained(str(run / "adapter")).r == 1


def test_the_written_config_repeats_the_run(tmp_path: Path) -> None:
    assert main(["train", str(_write(tmp_path)), "--steps", "2", "--seed", "3"]) == 0
    again = tmp_path / "again"
    assert main(["train", str(tmp_path / "run" / "config.yaml"), "--run_directory", str(again)]) == 0
    first, second = (
        [(record["loss_sum"], record["grad_norm"]) for record in read_metrics(folder)]
        for folder in (tmp_path / "run", again)
    )
    assert first == second


def test_a_step_without_finite_gradients_is_skipped_and_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = str(_write(tmp_path, weight=1e300, steps=2))
    assert main(["train", config]) == 0
    shown = capfd.readouterr().out
    assert "SKIPPED: the gradients were not finite" in shown
    assert "2 of 2 steps were skipped" in shown
    record = read_metrics(tmp_path / "run")[0]
    assert record["skipped"] is True
    assert record["grad_norm"] is None, "JSON has no NaN"
    factors = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert all(not factor.any() for name, factor in factors.items() if "lora_B" in name), "nothing was updated"


def test_without_lora_the_whole_model_is_trained_and_written(tmp_path: Path) -> None:
    assert main(["train", str(_write(tmp_path, lora=None, steps=1))]) == 0
    run = tmp_path / "run"
    assert sorted(file.name for file in run.iterdir()) == ["config.yaml", "metrics.jsonl", "model"]
    again = str(_write(tmp_path, model=str(run / "model"), steps=1, run_directory=str(tmp_path / "again")))
    assert main(["train", again, "--data.tokenizer", "tiny"]) == 0


# ---------------------------------------------------------------- ranks


def _fail_on_rank_one() -> None:
    if rank_here() == 1:
        raise CommandError("the disk of rank 1 is full; free some space")
    import torch.distributed as dist

    dist.barrier()


def _crash_on_rank_one() -> None:
    if rank_here() == 1:
        raise KeyError("lost")
    import torch.distributed as dist

    dist.barrier()


def test_an_error_of_one_rank_ends_all_with_its_text_alone() -> None:
    with pytest.raises(CommandError) as caught:
        on_ranks(_fail_on_rank_one, processes=2)
    assert str(caught.value) == "the disk of rank 1 is full; free some space"


def test_a_fault_of_one_rank_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "probe_on_rank", lambda *args: None)
    monkeypatch.setattr(probe, "on_ranks", lambda *args, **kwargs: on_ranks(_crash_on_rank_one, processes=2))
    assert main(["probe", "tiny", "--cp", "2"]) == 1
    shown = capfd.readouterr().err
    assert "deltamesh probe: rank 1 failed: KeyError: 'lost'" in shown
    assert "_crash_on_rank_one" in shown


# ---------------------------------------------------------------- probe


def test_the_probe_runs_where_cp_and_tp_groups_are_strided(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "tiny", "--processes", "4", "--cp", "2", "--tp", "2", "--steps", "2"]) == 0
    shown = capfd.readouterr().out
    assert "dp=1 cp=1 tp=1" in shown, "one process is the reference"
    assert "dp=1 cp=2 tp=2" in shown
    assert "all topologies agree with dp=1 cp=1 tp=1" in shown


def test_the_probe_runs_under_torchrun_and_only_rank_0_speaks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "deltamesh"]
    probed = ["probe", "tiny", "--cp", "2", "--steps", "1", "--groups", "1", "--no-reference"]
    done = subprocess.run([*command, *probed], capture_output=True, text=True, timeout=280, env=_environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("one topology, so nothing to compare it with") == 1


def test_an_error_under_torchrun_is_printed_once() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "deltamesh"]
    done = subprocess.run(
        [*command, "probe", "tiny", "--cp", "3"], capture_output=True, text=True, timeout=280, env=_environment()
    )
    assert done.returncode != 0
    assert done.stderr.count("does not divide the world size 2") == 1, done.stderr


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _result(value: float, norm: float = 2.0) -> ProbeResult:
    return ProbeResult(
        seconds=[0.1, 0.1],
        losses=[1.0, 1.0],
        norms=[1.0, norm],
        tokens=8,
        rows=4,
        values=[{"log-probs of input 0 in step 1": np.array([-1.0, value])}],
    )


def test_the_largest_difference_is_found_on_any_rank() -> None:
    two = replace(_result(-2.0, 2.5), values=[*_result(-2.0).values, *_result(-3.0).values])
    error, where, norm = largest_difference(two, _result(-2.0))
    assert error == pytest.approx(1 / 5**0.5)
    assert where == "log-probs of input 0 in step 1 on rank 1"
    assert norm == pytest.approx(0.25)


@pytest.mark.parametrize("other", [_result(-2.001), _result(float("nan")), _result(-2.0, norm=2.001)])
def test_a_probe_whose_topologies_disagree_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other: ProbeResult
) -> None:
    monkeypatch.setattr(probe, "on_ranks", lambda _, __, topologies, processes: dict.fromkeys(topologies, other))
    monkeypatch.setattr(probe, "probe_on_rank", lambda _, topologies: dict.fromkeys(topologies, _result(-2.0)))
    assert main(["probe", "tiny", "--topology", "111", "cp=2"]) == 1
    captured = capsys.readouterr()
    assert "the topologies disagree with dp=1 cp=1 tp=1 by more than 2e-05" in captured.err
    assert "agree with" not in captured.out


# ---------------------------------------------------------------- verify


def test_verify_writes_what_it_shows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    assert main(["verify", "--dtype", "float64", "--topology", "cp=2", "--json", str(path)]) == 0
    shown = capfd.readouterr().out
    assert "against one process, naive ops, unshared; tolerance 1e-09" in shown
    assert "all 1 comparisons are within tolerance" in shown
    (row,) = json.loads(path.read_text())
    assert (row["run"], row["good"]) == ("dp=1 cp=2 tp=1", True)
    assert row["worst"].keys() == verification.KINDS.keys()
    assert 0 < max(worst["error"] for worst in row["worst"].values()) < 1e-9


def test_verify_fails_on_a_miss_and_names_tensor_and_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worst = {kind: Deviation(rank=0, tensor=f"{kind}/0", error=1e-12) for kind in verification.KINDS}
    worst["gradient"] = Deviation(rank=3, tensor="gradient/model.norm.weight", error=float("inf"))
    verdict = verification.Verdict(run="dp=1 cp=2 tp=2", reference="one process", tolerance=1e-9, worst=worst)
    monkeypatch.setattr(verification, "verify", lambda *args, **kwargs: iter([verdict]))
    assert main(["verify", "--dtype", "float64", "--topology", "122"]) == 1
    captured = capsys.readouterr()
    assert "MISS" in captured.out
    assert "gradient/model.norm.weight" in captured.out
    assert "1 of 1 comparisons are out of tolerance: dp=1 cp=2 tp=2 (float64, all)" in captured.err


def test_the_matrix_holds_every_topology_that_is_promised() -> None:
    assert len(verify._CUTS) == 5
    topologies = matrix()
    assert len(topologies) == len(set(topologies)) == 21
    assert {t for t in topologies if t.world_size == 1} == {Topology()}
    assert all(Topology(dp=t.dp, cp=t.cp, tp=t.tp, sp=not t.sp) in topologies for t in topologies if t.tp > 1)


def test_the_clock_shows_hours_only_if_there_are_any() -> None:
    assert [clock(s) for s in (0, 34.4, 59.6, 3725)] == ["0:00", "0:34", "1:00", "1:02:05"]
