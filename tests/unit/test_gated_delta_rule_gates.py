"""Gates over a wide range in fp32, gates of minus infinity, and what a forward keeps for its backward."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deltamesh.ops import gated_delta_rule
from tests.unit.gated_delta_rule_common import Inputs, assert_close, make_inputs

NAMES = ["o", "q", "k", "v", "g", "beta"]


def run(x: Inputs, **options: Any) -> list[Tensor]:
    o, _ = gated_delta_rule(*x.leaves(), use_qk_l2norm=True, **options)
    weights = torch.cos(torch.arange(o.numel(), dtype=torch.float64)).view(o.shape).to(o)
    return [o.detach(), *torch.autograd.grad((o * weights).sum(), x.leaves())]


@pytest.mark.parametrize("strong", [-50.0, -1e4])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_rows_that_forget_everything_leave_the_decay_between_others_exact_in_fp32(strong: float, tree: bool) -> None:
    x = make_inputs(200)
    rng = torch.Generator().manual_seed(1)
    g = torch.where(torch.rand(x.g.shape, generator=rng) < 0.2, strong, -1e-3).double()
    x = Inputs(**{**vars(x), "g": g.requires_grad_()})
    options = {"cu_seqlens": [0, 100, 130, 140, 200], "parents": [-1, 0, 0, 1]} if tree else {}
    narrow = x.to(torch.float32)
    wide = narrow.to(torch.float64)  # the same rounded inputs
    assert_close(NAMES, run(narrow, **options), run(wide, backend="naive", **options), 2e-5)


def test_a_gate_of_minus_infinity_forgets_and_nothing_else() -> None:
    x = make_inputs(90)
    with torch.no_grad():
        x.g[:, 40] = -torch.inf
    found = run(x)
    assert all(bool(torch.isfinite(each).all()) for each in found)
    with torch.no_grad():
        x.g[:, 40] = -2000.0
    assert_close(NAMES, found, run(x), 1e-10)


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """All floating-point tensors reachable from a value through containers and plain objects."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | str | bytes | int | float | None):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            if each.is_floating_point():
                yield each
        elif isinstance(each, dict):
            todo += list(each.values())
        elif isinstance(each, list | tuple | set | frozenset):
            todo += list(each)
        elif hasattr(each, "__dict__") and type(each).__module__.startswith("deltamesh"):
            todo += list(vars(each).values())


def test_everything_kept_for_the_backward_is_a_saved_tensor() -> None:
    """Only those can activation checkpointing drop and make again."""
    x = make_inputs(300)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: saved[i]):
        o, _ = gated_delta_rule(*x.leaves())
    node = o.grad_fn
    while node is not None and "GatedDeltaRule" not in type(node).__name__:
        node = node.next_functions[0][0]
    assert node is not None
    assert sum(t.numel() for t in saved) > sum(t.numel() for t in x.leaves()), "the intermediates are among them"
    assert [tuple(t.shape) for t in floating_tensors(vars(node))] == []
