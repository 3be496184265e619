"""The state pass by itself: one launch, against the chunk recurrence in fp64 with the same w, u, k and g."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.cases import make_pieces, relative_error

pytestmark = pytest.mark.usefixtures("interpreted")

CHAIN = make_pieces([(130, -1, 0)], exports=(0,))


def draw(dtype: torch.dtype, *, T: int, H: int = 1, K: int = 32, V: int = 32) -> dict[str, Tensor]:
    """Rows whose decays hardly forget, so that what is rounded in one chunk is still there after the last."""
    random = torch.Generator().manual_seed(1)
    k = torch.nn.functional.normalize(torch.randn(T, H, K, generator=random) + 1, dim=-1)
    w = 0.05 * torch.nn.functional.normalize(torch.randn(T, H, K, generator=random) + 1, dim=-1)
    return {
        "k": k.to(dtype),
        "w": w.to(dtype),
        "u": torch.randn(T, H, V, generator=random).to(dtype),
        "g": -1e-4 * torch.rand(T, H, generator=random),
    }


def recurrence(rows: dict[str, Tensor], state: Tensor, values: bool = True) -> Tensor:
    """The state after all rows of one head, in fp64."""
    k, w, u, g = (rows[name][:, 0].double() for name in ("k", "w", "u", "g"))
    for first in range(0, len(k), 64):
        chunk = slice(first, first + 64)
        v = (u[chunk] if values else 0) - w[chunk] @ state
        last = g[chunk][-1]
        state = torch.exp2(last) * state + k[chunk].T @ (torch.exp2(last - g[chunk])[:, None] * v)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transitions_of_low_precision_rows_are_fp32_exact(dtype: torch.dtype) -> None:
    """Products in bf16 or TF32 would be wrong by 1e-3 here."""
    from deltamesh.ops.gated_delta_rule.cuda.schedule import FlaSchedule
    from deltamesh.ops.gated_delta_rule.cuda.state_pass import state_pass

    rows = draw(dtype, T=CHAIN.num_rows)
    tables = FlaSchedule(CHAIN, torch.device("cpu"), split="tree").tables(1, 32, 32)
    wide = torch.full((tables.through.num_states, 1, 32, 64), float("nan"))
    chunks = torch.empty(3, 1, 32, 32, dtype=dtype)
    nothing = torch.empty(tables.own.num_states, 1, 32, 32)
    state_pass(
        tables.own,
        **rows,
        h=chunks,
        v_new=torch.empty_like(rows["u"]),
        states=nothing,
        through=tables.through,
        wide_states=wide,
    )
    found = wide[tables.through_exports.states][0, 0].double()
    E = recurrence(rows, torch.zeros(32, 32, dtype=torch.float64))
    M = recurrence(rows, torch.eye(32, dtype=torch.float64), values=False)
    assert relative_error(found[:, :32], E) < 1e-6
    assert relative_error(found[:, 32:] - torch.eye(32), M - torch.eye(32)) < 1e-6


def test_one_launch_writes_every_chunk_state_and_value() -> None:
    from deltamesh.ops.gated_delta_rule.cuda.schedule import FlaSchedule
    from deltamesh.ops.gated_delta_rule.cuda.state_pass import state_pass

    pieces = make_pieces([(65, -1, -1), (1, 0, -1), (2, 0, -1)])
    rows = draw(torch.float32, T=68)
    schedule = FlaSchedule(pieces, torch.device("cpu"), split="tree")
    tables = schedule.tables(1, 32, 32)
    assert len(tables.whole.waves) == 1
    h = torch.full((schedule.chunks.count, 1, 32, 32), float("nan"))
    v_new = torch.full_like(rows["u"], float("nan"))
    states = torch.full((tables.whole.num_states, 1, 32, 32), float("nan"))
    state_pass(tables.whole, **rows, h=h, v_new=v_new, states=states)
    assert not h.isnan().any()
    assert not v_new.isnan().any()
    # chunks: two of the root, then one of each child, which start from the root's end
    end = recurrence({name: x[:65] for name, x in rows.items()}, torch.zeros(32, 32, dtype=torch.float64))
    assert np.allclose(h[2, 0], h[3, 0], rtol=0, atol=0)
    assert relative_error(h[2, 0], end) < 1e-6
