"""Compiles the kernels of the state pass for sm_90; prints their shared memory and counts of products as JSON."""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deltamesh.ops.gated_delta_rule.cuda import state_pass

ROWS, FP32, INTS = "*bf16", "*fp32", "*i32"
FORWARD = dict.fromkeys(("k", "w", "u", "h", "v_new"), ROWS)
FORWARD |= dict.fromkeys(("g", "states", "wide_states"), FP32)
FORWARD |= dict.fromkeys(("ranges", "visits", "through_ranges", "through_visits"), INTS)
FORWARD |= dict.fromkeys(("first_job", "num_jobs", "first_through"), "i32")
BACKWARD = dict.fromkeys(("q", "k", "w", "do", "dv", "dv_new"), ROWS)
BACKWARD |= dict.fromkeys(("g", "dh", "gradients"), FP32)
BACKWARD |= dict.fromkeys(("ranges", "forward_visits", "backward_visits", "added"), INTS)
BACKWARD |= {"scale": "fp32", "first_job": "i32"}
SHAPE = {"H": 16, "HK": 8, "K": 128, "V": 128, "C": 64, "BK": 128, "B": 32}


def report(which: str) -> dict[str, int]:
    kernel = state_pass._backward_kernel if which == "backward" else state_pass._forward_kernel
    types = BACKWARD if which == "backward" else FORWARD
    constants = SHAPE if which == "backward" else SHAPE | {"HAS_THROUGH": which == "through"}
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "")[:1] == "*"},
    )
    options = {"num_warps": state_pass._warps(128, torch.bfloat16, has_through=which == "through"), "num_stages": 2}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    return {
        "shared_bytes": compiled.metadata.shared,
        "tensor_core_products": ptx.count("wgmma.mma"),
        "tf32_products": ptx.count(".tf32"),
    }


json.dump({which: report(which) for which in ("forward", "through", "backward")}, sys.stdout)
