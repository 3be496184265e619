"""The pieces of benchmarks/gpu.py at tiny sizes, under Triton's interpreter; on a GPU the same code runs."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deltamesh.models import param_specs, save_directory, tiny_config
from deltamesh.models.blocks import OpBackends
from deltamesh.models.tiny import random_state

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
_CPU = torch.device("cpu")
_CHECK = {
    "lengths": [66, 1],
    "parents": [-1, 0],
    "heads": 2,
    "chain": 18,
    "dim": {torch.float32: 16, torch.bfloat16: 16},
    "group": {"prompt": 2, "completions": 2, "length": 1},
}
_GROUP = {"prompt": 4, "completions": 2, "length": 2}
_SIZES: dict[str, Any] = {
    "check": _CHECK,
    "dim": 16,
    "dtype": torch.float32,  # the library sums g's gradient in bf16, which the interpreter refuses
    "chains": [(66, 2)],
    "key_heads": 1,
    "trees": {"three nodes": ([3, 2, 2], [-1, 0, 0])},
    "tree_heads": 1,
    "laps": 1,
    "steps": [("tiny", _GROUP, ("torch", "torch, nothing shared"))],
    "max_rows": 64,
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(_BENCHMARKS))
    return importlib.import_module("gpu")


@pytest.fixture
def attention_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention has no backward on a CPU; the other ops stay those of "fla"."""
    named = OpBackends.named

    def without_flex(backend: Any) -> OpBackends:
        found = named(backend)
        return OpBackends(delta_rule=found.delta_rule, convolution=found.convolution, attention="torch")

    monkeypatch.setattr(OpBackends, "named", staticmethod(without_flex))


def two_layers(path: Path) -> Path:
    """A model of few heads: the interpreter takes the heads one after another."""
    config = tiny_config()
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[1:3]
    config.linear_num_key_heads, config.linear_num_value_heads = 1, 2
    save_directory(random_state(param_specs(config), 0).items(), config, path, dtype=torch.float32)
    return path


def cases(gpu: Any) -> list[Any]:
    return gpu.cases_of(_SIZES, {"tiny": "tiny"})  # type: ignore[no-any-return]


def measured(gpu: Any, chosen: list[Any], **run: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"left_out": [], "failed": {}}
    gpu.run_cases(chosen, gpu.Run(device=_CPU, sizes=_SIZES, **run), found, lambda: None)
    return found


@pytest.mark.usefixtures("interpreted", "attention_of_torch")
def test_checks_of_ops_and_model_are_right(gpu: Any, tmp_path: Path) -> None:
    found = gpu.check(_CPU, _CHECK, {"of two layers, fp32": (two_layers(tmp_path / "model"), torch.float32)})
    assert list(found) == ["tree, fp32", "tree, bf16", "three slices, fp32", "model of two layers, fp32"]
    assert all(case["right"] for case in found.values()), found


@pytest.mark.usefixtures("interpreted")
def test_wrong_op_stops_before_anything_is_timed_or_written(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = importlib.import_module("_gpu_checks")
    right = checks.gated_delta_rule

    def wrong(*args: Any, backend: str, **named: Any) -> Any:
        o, final = right(*args, backend=backend, **named)
        return (o * (1 + 1e-3), final) if backend == "fla" else (o, final)

    monkeypatch.setattr(checks, "gated_delta_rule", wrong)
    monkeypatch.setattr(gpu, "checked_models", lambda models: {})
    monkeypatch.setattr(gpu, "run_cases", lambda *_: pytest.fail("timed"))
    saved: list[Any] = []
    found = gpu.measure_all(_CPU, _SIZES, begin=0.0, budget_s=1.0, compile_s=0.0, save=saved.append)
    assert not found["right"]
    assert not found["checks"]["tree, fp32"]["right"]
    assert not saved
    assert not {"chains", "trees", "steps"} & found.keys()


def test_no_number_is_not_within_a_bound(gpu: Any) -> None:
    checks = importlib.import_module("_gpu_checks")
    assert checks.within({"o": 1e-6}, 1e-5)
    assert not checks.within({"o": float("nan")}, 1e-5)
    assert not checks.within({}, 1e-5)


@pytest.mark.usefixtures("interpreted")
def test_chains_and_trees_are_timed_and_agree_with_the_library(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("_gpu_laps"), "LEAST_LAPS", 1)
    found = measured(gpu, [case for case in cases(gpu) if case.section != "steps"])
    assert not found["failed"], found["failed"]
    assert not found["left_out"]
    chain, tree = found["chains"]["T=66 H=2"], found["trees"]["three nodes"]
    assert set(chain) == {"fla", "ours", "laps"}
    assert set(tree) == {
        "fla, a call per depth",
        *(f"ours, jobs are {x}" for x in ("trees", "chains", "chosen")),
        "laps",
    }
    for row in (chain, tree):
        assert row.pop("laps") == 1
        assert all(work["ms"] > 0 and work.get("error_against_first", 0) < 1e-5 for work in row.values())


def test_steps_are_timed(gpu: Any) -> None:
    found = measured(gpu, [case for case in cases(gpu) if case.section == "steps"])
    assert not found["failed"], found["failed"]
    (row,) = found["steps"].values()
    assert row["tokens"] == 12
    assert row["rows_shared"] == 8
    assert row["torch"]["ms"] > 0
    assert row["torch, nothing shared"]["ms"] > 0


def test_step_of_six_layers_trains_the_adapter_in_bf16(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = importlib.import_module("_model").write_model(tmp_path)
    trainer, ranks = gpu.trainer, []
    monkeypatch.setattr(gpu, "trainer", lambda *args, **named: ranks.append(trainer(*args, **named)) or ranks[-1])
    run = gpu.Run(device=_CPU, sizes=_SIZES | {"dtype": torch.bfloat16})
    data = gpu.group(gpu.np.random.default_rng(0), 256, **_GROUP)
    work = gpu.step_of(path, "torch", data, shared=True, run=run)
    before = {name: p.detach().clone() for name, p in ranks[0].model.named_parameters()}
    work()
    moved = {name for name, p in ranks[0].model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert moved == ranks[0].trainable_parameters().keys()
    assert all(".lora_" in name for name in moved)


def test_peers_that_differ_get_no_times(gpu: Any) -> None:
    works = {"fla": lambda: [torch.ones(2)], "ours": lambda: [torch.full((2,), 1.2)]}
    case = gpu.Case(section="chains", name="c", work=lambda run: gpu.measure(works, run, 5))
    found = measured(gpu, [case])
    assert "PeersDiffer" in found["failed"]["chains: c"]
    assert not found.get("chains")


def test_cases_beyond_the_budget_are_named_and_not_run(gpu: Any) -> None:
    slow = {"ours": lambda: time.sleep(0.05)}
    made = [gpu.Case(section="steps", name=n, work=lambda run: gpu.measure(slow, run, 5)) for n in ("a", "b", "c")]
    found = measured(gpu, made, deadline=time.perf_counter() + 0.5)
    assert set(found["steps"]) == {"a"}
    assert len(found["left_out"]) == 2
    found = measured(gpu, made[:1], deadline=time.perf_counter() + 0.2)
    assert found["left_out"] == ["steps: a (cut short after 2 of 5 laps)"]


@pytest.mark.usefixtures("interpreted")
def test_compiling_runs_the_named_work_alone(gpu: Any) -> None:
    seen: list[str] = []
    works = {name: partial(seen.append, name) for name in ("fla", "ours")}
    case = gpu.Case(section="chains", name="c", work=lambda run: gpu.measure(works, run, 5), kernels=("fla", "ours"))
    gpu.compile_only("chains/c/ours", [case], _CPU, _SIZES, {})
    assert seen == ["ours"]


def test_processes_side_by_side_end_in_time(gpu: Any) -> None:
    python = [sys.executable, "-S", "-c"]
    commands = [[*python, "pass"], [*python, "raise SystemExit(3)"], [*python, "import time; time.sleep(60)"]]
    begin = time.perf_counter()
    counts = gpu.side_by_side(commands, limit_s=3.0, at_once=2)
    assert counts == {"done": 1, "failed": 1, "out_of_time": 1}
    assert time.perf_counter() - begin < 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_claimed_or_written(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    run = subprocess.run(
        [sys.executable, str(_BENCHMARKS / "gpu.py"), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["device"] is None
    assert not out.exists()
