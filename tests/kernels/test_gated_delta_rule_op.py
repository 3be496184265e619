"""The public op with backend "fla" against backend "torch", through autograd, under Triton's interpreter."""

import numpy as np
import pytest
import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule import ScanContext, gated_delta_rule
from deltamesh.plan.slices import cut_forest
from tests.forests import make_forest
from tests.kernels.cases import NAMES, make_case, make_pieces, relative_error
from tests.unit.gated_delta_rule_common import nan_in_fresh_memory
from tests.unit.test_gated_delta_rule_slices import Board, BoardCarrier

pytestmark = pytest.mark.usefixtures("interpreted", "nan_in_fresh_memory")
__all__ = ["nan_in_fresh_memory"]


def run(inputs: dict[str, Tensor], backend: str, **options: object) -> tuple[Tensor, ...]:
    """Output, final states and the gradients of all inputs."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    o, final = gated_delta_rule(**leaves, backend=backend, output_final_state=True, **options)  # type: ignore[arg-type]
    assert final is not None
    weight = torch.linspace(-1, 1, o.numel()).view(o.shape)
    return o, final, *torch.autograd.grad((o * weight).sum() + final.square().sum(), list(leaves.values()))


def inputs_of(num_rows: int) -> dict[str, Tensor]:
    case = make_case(make_pieces([(num_rows, -1, -1)]), K=16, V=16)
    return {name: x[None] for name, x in zip(NAMES, case.inputs, strict=True)}


def test_tree_with_its_final_states_equals_the_torch_backend() -> None:
    options = {"cu_seqlens": [0, 3, 4, 9, 11], "parents": [-1, 0, 0, 2]}
    found, wanted = (run(inputs_of(11), backend, **options) for backend in ("fla", "torch"))
    assert max(map(relative_error, found, wanted)) < 2e-5


def test_packed_sequences_with_given_states_equal_the_torch_backend() -> None:
    inputs = inputs_of(9) | {"initial_state": torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(3))}
    found, wanted = (run(inputs, backend, cu_seqlens=[0, 7, 9]) for backend in ("fla", "torch"))
    assert max(map(relative_error, found, wanted)) < 2e-5


def test_slices_with_carriers_give_the_result_of_one_process() -> None:
    """Cuts inside nodes, at a fork and next to one another: E and M, both exchanges, forked gradients across slices."""
    forest = make_forest([-1, 0, 0, 1, -1, 4], [6, 3, 2, 4, 2, 3], [0.2, 0.45, 0.45, 0.8])
    inputs = inputs_of(forest.num_rows)
    weight = torch.linspace(-1, 1, inputs["v"].numel()).view(inputs["v"].shape)
    starts = [*forest.start.tolist(), forest.num_rows]
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    whole, _ = gated_delta_rule(**leaves, cu_seqlens=starts, parents=forest.parent.tolist())
    wanted = [whole, *torch.autograd.grad((whole * weight).sum(), list(leaves.values()))]

    cut = cut_forest(forest.parent, forest.start, forest.length, forest.cuts)
    board = Board(forest=cut)
    runs = []
    for rank, (first, end) in enumerate(zip(cut.cuts[:-1].tolist(), cut.cuts[1:].tolist(), strict=True)):
        part = {name: x[:, first:end].clone().requires_grad_() for name, x in inputs.items()}
        pieces = cut.slice_pieces(rank, np.zeros(0, dtype=np.int64))
        context = ScanContext.build(pieces, carrier=BoardCarrier(board, rank))
        o, _ = gated_delta_rule(**part, context=context, backend="fla")
        runs.append((o, list(part.values()), weight[:, first:end]))
    grads = [torch.autograd.grad((o * w).sum(), part) for o, part, w in reversed(runs)][::-1]
    found = [torch.cat(columns, 1) for columns in ([o for o, _, _ in runs], *zip(*grads, strict=True))]
    errors = dict(zip(("o", *inputs), map(relative_error, found, wanted), strict=True))
    assert max(errors.values()) < 2e-5, errors
