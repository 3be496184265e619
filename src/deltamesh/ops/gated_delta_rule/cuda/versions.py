"""Whether this machine can run the CUDA kernels: flash-linear-attention, Triton, a device or Triton's interpreter."""

import importlib.metadata
import importlib.util
import os

import torch

FLA_LEAST = (0, 6)
FLA_BEYOND = (0, 7)
PIP_COMMAND = 'pip install "deltamesh[cuda]"'


def check_fla_version() -> str:
    """The version of flash-linear-attention, which must be >= 0.6 and < 0.7. Imports nothing of it.

    Its chunk kernels are called one by one, and their signatures, the units of their gates (base 2) and the layout of
    their states are those of 0.6.

    Raises:
        ImportError: the library or Triton is missing, or the version is another one.

    Example:
        >>> check_fla_version()  # doctest: +SKIP
        '0.6.0'
    """
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            f"backend 'fla' needs triton, which is not installed; run `{PIP_COMMAND}`, or use backend 'torch'"
        )
    found = {}
    for package in ("flash-linear-attention", "fla-core"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(
                f"backend 'fla' needs {package} >=0.6,<0.7, which is not installed; run `{PIP_COMMAND}`, "
                "or use backend 'torch'"
            ) from None
        if not FLA_LEAST <= _release(found[package]) < FLA_BEYOND:
            raise ImportError(
                f"backend 'fla' needs {package} >=0.6,<0.7, but {found[package]} is installed; run `{PIP_COMMAND}`, "
                "or use backend 'torch'"
            )
    return found["flash-linear-attention"]


def interpreting() -> bool:
    """Whether Triton was told to run kernels on the CPU (`TRITON_INTERPRET=1` before its import)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def check_device(device: torch.device) -> None:
    """Refuses devices on which the kernels cannot run.

    Raises:
        ValueError: `device` is no CUDA device and Triton's interpreter is off.
    """
    if device.type == "cuda" or (device.type == "cpu" and interpreting()):
        return
    raise ValueError(
        f"backend 'fla' cannot run on device {str(device)!r}: its kernels need a CUDA device; use backend 'torch', or "
        "set TRITON_INTERPRET=1 before Triton is imported to run them on the CPU, slowly, for tests"
    )


def check_float32_products() -> None:
    """Refuses fp32 rows while nothing says how the library's kernels shall multiply them; their default is TF32.

    Raises:
        ValueError: TRITON_F32_DEFAULT is not set.
    """
    import triton

    if triton.knobs.language.fp32_default is None:
        raise ValueError(
            "backend 'fla' got float32 rows on a CUDA device, whose products would silently be TF32 (10 bits); set "
            "TRITON_F32_DEFAULT=ieee before the first kernel is compiled (or tf32 if that is meant), or use bfloat16"
        )


def _release(version: str) -> tuple[int, int]:
    """The first two numbers of a version.

    Example:
        >>> _release("0.6.1.dev3")
        (0, 6)
    """
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        raise ImportError(
            f"cannot read the version {version!r} of flash-linear-attention; run `{PIP_COMMAND}`"
        ) from None
