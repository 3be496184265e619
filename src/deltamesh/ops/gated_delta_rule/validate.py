"""Checks of the op's tensors: what was given, why it cannot be, what to do."""

import torch
from torch import Tensor


def check_inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Checks shapes, dtypes and devices of the op's inputs [B, T, ...].

    Raises:
        ValueError: they do not fit each other.
    """
    for name, x, dims, letters in (
        ("q", q, 4, "[B, T, Hk, K]"),
        ("k", k, 4, "[B, T, Hk, K]"),
        ("v", v, 4, "[B, T, H, V]"),
        ("g", g, 3, "[B, T, H]"),
        ("beta", beta, 3, "[B, T, H]"),
    ):
        if x.dim() != dims:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, which is not {letters}; reshape it")
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}; give a floating point tensor")
        if x.device != v.device:
            raise ValueError(f"{name} is on {x.device} but v is on {v.device}; move all inputs to one device")
    if q.shape != k.shape:
        raise ValueError(f"q has shape {tuple(q.shape)} but k has {tuple(k.shape)}; give both as [B, T, Hk, K]")
    num_heads = v.shape[2]
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"q and k have {tuple(k.shape[:2])} rows but v has {tuple(v.shape[:2])}; give equal B and T")
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != v.shape[:3]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; give one value per row and head of v, {tuple(v.shape[:3])}"
            )
    key_heads = k.shape[2]
    if key_heads == 0 or num_heads % key_heads:
        raise ValueError(f"{num_heads} value heads cannot share {key_heads} key heads evenly; give H a multiple of Hk")
    if 0 in (k.shape[3], v.shape[3], num_heads):
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; heads and dims must be at least 1")
    double = torch.float64
    wide = [name for name, x in (("q", q), ("k", k)) if (x.dtype == double) != (v.dtype == double)]
    if wide:
        raise ValueError(
            f"{' and '.join(wide)} and v mix fp64 with a lower precision (v is {v.dtype}); cast them alike"
        )
