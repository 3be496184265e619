"""Inside layers, nothing waits for the device to answer the host, and no tensor has the length of the whole stream."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltamesh.distributed.mesh import build_mesh
from deltamesh.models import HybridCausalLM, random_weights, tiny_config
from deltamesh.ops.context import SliceContext
from deltamesh.plan import CostModel, plan_micro_batch
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Topology

HOST_ANSWERS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "item")
PROMPT, COMPLETION, COUNT = 701, 401, 4
ROWS = PROMPT + COUNT * COMPLETION


class Watch(TorchDispatchMode):
    """Records operators whose result the host waits for, and the elements of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.host: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in HOST_ANSWERS:
            self.host.append(name)
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


def watch_layers(topology: Topology, chain: bool) -> list[tuple[str, list[str], int, int]]:
    """Per layer: its kind, host answers, the elements of the largest tensor, and the rows of the slice."""
    mesh = build_mesh(topology)
    config = tiny_config()
    model = HybridCausalLM(config, tp_rank=mesh.tp.rank, tp_size=mesh.tp.size)
    random_weights(model, 0)
    prompt = list(range(PROMPT))
    sequences = (
        [[i % 259 for i in range(ROWS)]]
        if chain
        else [[*(p % 259 for p in prompt), *((c * 7 + i * i) % 259 for i in range(COMPLETION))] for c in range(COUNT)]
    )
    plan = plan_micro_batch(sequences, [None] * len(sequences), num_slices=topology.cp, conv_width=4, cost=CostModel())
    own = plan.slices[mesh.cp.rank]
    context = SliceContext.from_plan(own, cp=mesh.cp, tp=mesh.tp, sp=topology.sp, device=torch.device("cpu"))
    rows = -(-context.num_rows // mesh.tp.size) if topology.sp else context.num_rows
    seen = []
    for kind, layer in zip(config.layer_types, model.model.layers, strict=True):
        x = torch.randn(rows, config.hidden_size, requires_grad=True)
        tables = model.model.rotary.tables(context.positions_T, x.dtype)
        with Watch() as watch:
            layer(x, tables, context).sum().backward()
        seen.append((kind, watch.host, watch.largest, context.num_rows))
    return seen


@pytest.mark.parametrize("chain", [False, True], ids=["group", "chain"])
@pytest.mark.parametrize("topology", [Topology(cp=4), Topology(cp=2, tp=2)], ids=str)
def test_layers_ask_the_device_nothing_and_hold_only_their_slice(
    rank_pool: RankPool, topology: Topology, chain: bool
) -> None:
    alone = rank_pool.run(watch_layers, 1, Topology(), chain)[0]
    for rank, layers in enumerate(rank_pool.run(watch_layers, topology.world_size, topology, chain)):
        for (kind, host, largest, rows), (_, _, whole, all_rows) in zip(layers, alone, strict=True):
            assert not host, (rank, kind, host)
            share = whole * rows / all_rows
            if kind == "linear_attention":  # a few rows more for halos and padding
                assert largest < 1.2 * share < 0.75 * whole, (rank, kind, largest, share)
            elif not chain:  # keys and values of the path above the slice; of a chain, that is everything before
                assert largest < whole, (rank, kind, largest, whole)
