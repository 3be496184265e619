"""Which way boundary states are carried: by one exchange of (E, M), or in a pipeline of true states.

The rule computes how long the gated delta rule of one layer, forward and backward, takes each way. `scan`: what enters
a slice waits until everybody has made the states that leave, while work that waits for nobody goes on; paths that cross
a slice pay for M, and those that enter one for a second pass over the gradients of states. `pipeline`: no extra work,
but a slice may wait for those before it; the waits are followed block of heads by block of heads, as the carrier runs.
A pure function of the cuts and the layer's shape, so every rank chooses alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from deltamesh.plan.cuts import slice_rows
from deltamesh.plan.links import ScanLinks, plan_links
from deltamesh.plan.pipeline import PipelineLinks, plan_pipeline
from deltamesh.plan.slices import CutForest

CarrierName = Literal["auto", "scan", "pipeline"]
StateLinks = ScanLinks | PipelineLinks
Floats = npt.NDArray[np.float64]

# Measured on a CPU with one thread, processor time (H = 16, K = V = 128, fp32, 2048 rows of a path): the forward makes
# 19 GMAC/s of what `_Work` counts and the backward takes 1.9 times as long. Of the forward, states alone take 0.53 and
# solving the systems of the chunks, which needs no state, 0.17; E and M take 0.9 of it, near what `_Work` counts for
# them; of the backward, passing on the gradients of states takes 0.41. Every block of heads after the first costs 2% of
# the work and 0.3 ms. Assumed, not measured: a message over gloo on one machine takes 0.3 ms and 1 ns per byte.
_SECONDS_PER_MAC = 1 / 19e9
_BACKWARD = 1.9
_STATES = 0.53
_STATELESS = 0.17
_PASS_ON = 0.41
_BLOCK = 0.02  # of the work, for each block of heads after the first
_BLOCK_SECONDS = 3e-4
_MESSAGE_SECONDS = 3e-4
_BYTE_SECONDS = 1e-9
_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class RuleShape:
    """The gated delta rule of one layer, on one rank.

    Attributes:
        heads, key_heads: value heads and key heads.
        key_dim, value_dim: K and V.
    """

    heads: int = 16
    key_heads: int = 16
    key_dim: int = 128
    value_dim: int = 128


def plan_carrier(forest: CutForest, carrier: Literal["scan", "pipeline"]) -> Sequence[StateLinks]:
    """Every slice's messages for a carrier."""
    return plan_links(forest) if carrier == "scan" else plan_pipeline(forest)


def choose_carrier(forest: CutForest, carrier: str, shape: RuleShape) -> Literal["scan", "pipeline"]:
    """The carrier that is asked for, or with "auto" the one whose predicted time is shorter.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> from deltamesh.plan.slices import cut_forest
        >>> chain = cut_forest(np.array([-1]), np.array([0]), np.array([8192]), np.array([0, 4096, 8192]))
        >>> choose_carrier(chain, "auto", RuleShape())
        'pipeline'
    """
    if carrier == "scan":
        return "scan"
    if carrier == "pipeline":
        return "pipeline"
    if carrier != "auto":
        raise ValueError(f"carrier={carrier!r} is not known; use one of {', '.join(get_args(CarrierName))}")
    return "pipeline" if pipeline_seconds(forest, shape) < scan_seconds(forest, shape) else "scan"


def scan_seconds(forest: CutForest, shape: RuleShape) -> float:
    """Predicted time of forward and backward of one layer on its slowest rank, by `scan`."""
    rows, work = _Rows.of(forest), _Work.of(shape)
    links = plan_links(forest)
    pair = shape.heads * shape.key_dim * 4
    total = 0.0
    for way, scale in (("forward", 1.0), ("backward", _BACKWARD)):
        directions = [getattr(link, way) for link in links]
        sent = [
            sum(len(x) for x in d.send_states) * pair * shape.value_dim
            + sum(len(x) for x in d.send_transitions) * pair * shape.key_dim
            for d in directions
        ]
        if way == "forward":
            before = work.forward * _STATES * rows.local_exporting + work.transition * rows.entering_exporting
            during = work.forward * (
                (1 - _STATES) * rows.local_exporting + rows.local_rest + _STATELESS * rows.entering_rest
            )
            after = work.forward * ((1 - _STATELESS) * rows.entering)
        else:
            before = scale * work.forward * _PASS_ON * rows.entering
            during = scale * work.forward * (rows.local_rest + rows.entering_rest)
            after = scale * work.forward * (rows.local_exporting + rows.entering_exporting)
        arrival = before.max() + _MESSAGE_SECONDS * (forest.num_slices > 1) + max(sent) * _BYTE_SECONDS
        total += float((np.maximum(arrival, before + during) + after).max())
    return total


def pipeline_seconds(forest: CutForest, shape: RuleShape) -> float:
    """Predicted time of forward and backward of one layer on its slowest rank, by `pipeline`."""
    rows, work = _Rows.of(forest), _Work.of(shape)
    links = plan_pipeline(forest)
    blocks = max(1, min(links[0].num_blocks, shape.key_heads, shape.heads // 2))
    seconds_per_state = shape.heads * shape.key_dim * shape.value_dim * 4 / blocks * _BYTE_SECONDS
    latency = _MESSAGE_SECONDS
    forward = work.forward / blocks * (1 + _BLOCK * (blocks - 1))
    ranks = range(forest.num_slices)
    total = 0.0
    for way, order, scale in (("forward", ranks, 1.0), ("backward", reversed(ranks), _BACKWARD)):
        is_forward = way == "forward"
        sent: dict[tuple[int, int, bool, int], float] = {}  # (from, to, waited, block) -> when it arrives
        latest = 0.0
        for me in order:
            directions = getattr(links[me], way)
            clock = 0.0

            first = rows.local_exporting if is_forward else rows.entering_rest
            for block in range(blocks):
                clock += scale * forward * first[me]
                for message in directions.send_ready:
                    sent[me, message.peer, False, block] = clock + latency + len(message.states) * seconds_per_state
            unforced = rows.local_rest[me]
            last = rows.entering_rest if is_forward else rows.local_exporting
            solve = _STATELESS * work.forward * rows.entering[me] if is_forward else 0.0
            clock += solve
            for block in range(blocks):
                clock += scale * forward * unforced
                for messages, waited in ((directions.receive_ready, False), (directions.receive_waiting, True)):
                    for message in messages:
                        clock = max(clock, sent[message.peer, me, waited, block])
                clock += scale * forward * rows.entering_exporting[me]
                for message in directions.send_waiting:
                    sent[me, message.peer, True, block] = clock + latency + len(message.states) * seconds_per_state
                clock += scale * forward * last[me]
            latest = max(latest, clock - solve)
        total += latest + _BLOCK_SECONDS * (blocks - 1)
    return total


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Rows of each slice, float64 [P]: whether a state enters above them, and whether one leaves below them."""

    local_exporting: Floats
    local_rest: Floats
    entering_exporting: Floats
    entering_rest: Floats

    @property
    def entering(self) -> Floats:
        return self.entering_exporting + self.entering_rest

    @staticmethod
    def of(forest: CutForest) -> "_Rows":
        enters, leaves = forest.entry >= 0, forest.exporting
        return _Rows(
            local_exporting=slice_rows(forest, ~enters & leaves),
            local_rest=slice_rows(forest, ~enters & ~leaves),
            entering_exporting=slice_rows(forest, enters & leaves),
            entering_rest=slice_rows(forest, enters & ~leaves),
        )


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Seconds of a row: of the forward, and of M with the second state pass."""

    forward: float
    transition: float

    @staticmethod
    def of(shape: RuleShape) -> "_Work":
        K, V = shape.key_dim, shape.value_dim
        forward = 3 * K * V + _CHUNK * (2 * K + V + _CHUNK / 3)
        return _Work(
            forward=shape.heads * forward * _SECONDS_PER_MAC,
            transition=shape.heads * 2 * K * (V + K) * _SECONDS_PER_MAC,
        )
