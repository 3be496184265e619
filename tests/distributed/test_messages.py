"""How many exchanges a layer makes and what they carry."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from deltamesh.distributed import collectives
from deltamesh.models import tiny_config
from deltamesh.ops.gated_delta_rule import scan_carrier
from deltamesh.plan import CostModel, plan_micro_batch
from deltamesh.testing.equivalence import CUT_RULES, forked_inputs
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Topology
from deltamesh.train.trainer_rank import TrainerRank


def count_exchanges(topology: Topology, recompute: str) -> tuple[list[int], list[int]]:
    """Elements sent by each exchange of one forward, and of its backward."""
    sent: list[int] = []
    real = collectives.start_all_to_all_rows

    def counting(x: Tensor, *args: object) -> collectives.Pending:
        sent.append(x.numel())
        return real(x, *args)  # type: ignore[arg-type]

    with (
        mock.patch.object(collectives, "start_all_to_all_rows", counting),
        mock.patch.object(scan_carrier, "start_all_to_all_rows", counting),
    ):
        rank = TrainerRank.from_pretrained(
            "tiny", topology=topology, recompute=recompute, cuts=CUT_RULES["at-forks"], carrier="scan"
        )
        (batch,) = rank.forward_micro_batches([[x for group in forked_inputs() for x in group]])
        forward = list(sent)
        sent.clear()
        torch.stack([o.target_logprobs.sum() for o in batch.outputs]).sum().backward()
    return forward, list(sent)


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_a_layer_makes_two_exchanges_each_way_or_one_if_it_attends(rank_pool: RankPool, cp: int) -> None:
    """Whatever the number of slices, the depth of the tree, and what there is to send."""
    kinds = tiny_config().layer_types
    expected = sum(2 if kind == "linear_attention" else 1 for kind in kinds)
    for forward, backward in rank_pool.run(count_exchanges, cp, Topology(cp=cp), "none"):
        assert (len(forward), len(backward)) == (expected, expected)


def test_full_recomputation_replays_the_exchanges_of_the_forward(rank_pool: RankPool) -> None:
    for forward, backward in rank_pool.run(count_exchanges, 4, Topology(cp=4), "full"):
        assert len(backward) == 2 * len(forward)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_every_rank_sends_exactly_what_the_plan_says(rank_pool: RankPool, cp: int) -> None:
    config = tiny_config()
    flat = [x for group in forked_inputs() for x in group]
    plan = plan_micro_batch(
        [np.asarray(x.input_tokens) for x in flat], [np.asarray(x.target_tokens) for x in flat],
        num_slices=cp, conv_width=4, cost=CostModel(), cuts=CUT_RULES["at-forks"],
    )  # fmt: skip
    H, K, V = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * K + H * V
    for rank, (forward, backward) in enumerate(rank_pool.run(count_exchanges, cp, Topology(cp=cp), "none")):
        own = plan.slices[rank]
        halo, keys = own.halo.exchange, own.ancestors.exchange
        scan = [
            sum(map(len, way.send_states)) * H * K * V + sum(map(len, way.send_transitions)) * H * K * K
            for way in (own.links.forward, own.links.backward)
        ]
        key_value = 2 * config.num_key_value_heads * config.head_dim
        sent, returned = [], []
        for kind in config.layer_types:
            if kind == "linear_attention":
                sent += [len(halo.send_rows) * channels, scan[0]]
                returned += [halo.num_received * channels, scan[1]]
            else:
                sent.append(len(keys.send_rows) * key_value)
                returned.append(keys.num_received * key_value)
        assert sorted(forward) == sorted(sent)
        assert sorted(backward) == sorted(returned)
        if rank == 0:
            assert not any(map(len, own.links.forward.send_transitions)), "the first slice never computes M"
        if rank == cp - 1:
            assert scan[0] == 0, "the last slice sends nothing forward"
