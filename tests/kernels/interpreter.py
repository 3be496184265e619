"""Makes flash-linear-attention's and our Triton kernels run on a CPU, in a process started with TRITON_INTERPRET=1.

Four things stand in the way:

1. Autotuners time their candidates on a device that is not there. Each is cut to its first configuration.
2. Kernels call methods of their loop variables (`i_t.to(tl.int64)`), but the interpreter loops over Python ints. The
   builtin `range` of every kernel module is replaced by one that yields the interpreter's tensors.
3. The interpreter keeps bfloat16 as 16-bit integers and computes with them as integers. Operators on bfloat16 are
   wrapped: operands become fp32, results are rounded back.
4. Its own rounding to bfloat16 drops the carry out of the mantissa, or does not round at all. Conversions between fp32
   and bfloat16 are replaced by exact ones, to nearest even.
"""

import builtins
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt


def activate() -> None:
    """Prepares this process; called once, before the first kernel runs and after all kernel modules are imported."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "start the process with TRITON_INTERPRET=1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library warns that there is no device
        importlib.import_module("fla.modules.causal_conv1d")
        importlib.import_module("deltamesh.ops.gated_delta_rule.cuda.fla_chunks")
    _patch_bfloat16()
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.") and hasattr(module, "triton"):
            _cut_autotuners(module)
            if hasattr(module, "tl"):
                module.range = _tensor_range  # type: ignore[attr-defined]


def _cut_autotuners(module: Any) -> None:
    from triton.runtime.autotuner import Autotuner

    for kernel in vars(module).values():
        while kernel is not None and type(kernel).__module__.startswith(("triton.", "fla.")):
            if isinstance(kernel, Autotuner):
                kernel.configs = kernel.configs[:1]
            kernel = vars(kernel).get("fn") if hasattr(kernel, "__dict__") else None


def _tensor_range(*bounds: Any) -> Iterator[Any]:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    ints = [b if isinstance(b, int) else b.__index__() for b in bounds]
    for i in builtins.range(*ints):
        yield tl.tensor(TensorHandle(np.array([i], dtype=np.int32), tl.int32), tl.int32)


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """To nearest, ties to even, as devices round."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _patch_bfloat16() -> None:
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import TensorHandle

    builder = interpreter.InterpreterBuilder

    def is_bfloat16(x: Any) -> bool:
        return isinstance(x, TensorHandle) and x.dtype.scalar == tl.bfloat16

    def widen(x: Any) -> Any:
        return TensorHandle(bfloat16_to_float32(x.data), tl.float32) if is_bfloat16(x) else x

    def narrow(x: Any) -> Any:
        if x.data.dtype == np.bool_ or x.dtype.scalar != tl.float32:
            return x
        return TensorHandle(float32_to_bfloat16(x.data), tl.bfloat16)

    def computes_wide(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *operands: Any, **named: Any) -> Any:
            result = method(self, *map(widen, operands), **named)
            return narrow(result) if any(map(is_bfloat16, operands[:2])) else result

        return wrapped

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        return plain_dot(self, widen(a), widen(b), d, input_precision, max_num_imprecise_acc)

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return bfloat16_to_float32(data)
        if (source, target) == (tl.float32, tl.bfloat16):
            return float32_to_bfloat16(data)
        return plain_convert(data, source, target, rounding)

    def refuse(self: Any, input: Any) -> None:
        plain_check(self, input)
        assert all(arg.dtype.scalar != tl.bfloat16 for arg in input), (
            "a sum in bfloat16: too coarse, and unlike a device"
        )

    plain_check = interpreter.ReduceScanOpInterface.check_tensor
    interpreter.ReduceScanOpInterface.check_tensor = refuse
    plain_dot, plain_convert = builder.create_dot, interpreter._convert_float
    for name in ("binary_op", "unary_op"):
        setattr(builder, name, computes_wide(getattr(builder, name)))
    builder.create_dot = dot
    interpreter._convert_float = convert
