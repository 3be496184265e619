"""The state pass compiles for a real device. No device is needed for that, and the interpreter checks no types."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).with_name("compile_state_pass.py")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What the compiler reports, by kernel; in a process whose Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(_SCRIPT)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kernel", ["forward", "through", "backward"])
def test_kernel_compiles_for_hopper_within_its_shared_memory(kernel: str, compiled: dict[str, dict[str, int]]) -> None:
    """K = V = 128 in bf16, the models' shape. 227 KiB is what a Hopper multiprocessor gives one program."""
    report = compiled[kernel]
    assert 0 < report["shared_bytes"] <= 227 * 1024
    assert report["tensor_core_products"] > 0
    assert report["tf32_products"] == 0
