"""What is said where the kernels cannot run."""

import importlib.metadata
import os
import subprocess
import sys

import pytest
import torch

from deltamesh.ops.gated_delta_rule.cuda import versions


def pretend(monkeypatch: pytest.MonkeyPatch, package: str, version: str | None) -> None:
    """As if `version` of `package` were installed, or none."""
    real = importlib.metadata.version

    def found(name: str) -> str:
        if name != package:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)


@pytest.mark.parametrize("package", ["flash-linear-attention", "fla-core"])
def test_missing_library_names_the_pip_command(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, package, None)
    with pytest.raises(ImportError, match=rf'{package}.* not installed; run `pip install "deltamesh\[cuda\]"`'):
        versions.check_fla_version()


def test_missing_triton_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as Python reports a module that is not there
    with pytest.raises(ImportError, match=r'pip install "deltamesh\[cuda\]"'):
        versions.check_fla_version()


@pytest.mark.parametrize("version", ["0.5.9", "0.7.0", "1.0"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "flash-linear-attention", version)
    with pytest.raises(ImportError, match=rf'>=0.6,<0.7, but {version} is installed; run `pip install "deltamesh'):
        versions.check_fla_version()


def test_installed_version_is_accepted() -> None:
    assert versions.check_fla_version().startswith("0.6.")


def test_cpu_is_refused_unless_triton_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"cannot run on device 'cpu'.*use backend 'torch'"):
        versions.check_device(torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    versions.check_device(torch.device("cpu"))


def test_silent_tf32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    with pytest.raises(ValueError, match="TRITON_F32_DEFAULT=ieee"):
        versions.check_float32_products()
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    versions.check_float32_products()


def test_the_triangular_solve_multiplies_as_the_environment_says() -> None:
    """The library would fix it to TF32 on devices that have it, whatever TRITON_F32_DEFAULT says."""
    code = """
import triton.language as tl
from fla.ops.gated_delta_rule import chunk_fwd
chunk_fwd.SOLVE_TRIL_DOT_PRECISION = tl.constexpr("tf32")  # as on a GPU
from deltamesh.ops.gated_delta_rule.cuda import fla_chunks
print(chunk_fwd.SOLVE_TRIL_DOT_PRECISION.value)
"""
    for setting, found in (("ieee", "ieee"), ("tf32", "tf32"), (None, "tf32")):
        env = {name: value for name, value in os.environ.items() if name != "TRITON_F32_DEFAULT"}
        env |= {"TRITON_INTERPRET": "1"} | ({} if setting is None else {"TRITON_F32_DEFAULT": setting})
        run = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
        assert run.stdout.strip() == found
