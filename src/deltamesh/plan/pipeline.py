"""Pipeline: which true boundary states go from slice to slice, and whose gradients come back.

Each exported state goes straight to every slice that has a piece continuing it, and to no other. Messages of one pair
of ranks have one order on both sides: ready ones first, waiting ones after.
"""

from dataclasses import dataclass

import numpy as np

from deltamesh.plan.pieces import Ints
from deltamesh.plan.slices import CutForest


@dataclass(frozen=True, kw_only=True, eq=False)
class StateMessage:
    """States, or gradients of states, between this rank and one peer.

    Attributes:
        peer: group-local index.
        states: positions among this rank's exports or imports, ascending in stream order on both sides; never empty.
    """

    peer: int
    states: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineDirection:
    """One rank's messages of one direction, peers ascending.

    Attributes:
        send_ready, receive_ready: of what the sender has without waiting for anybody. Forward: states whose path starts
            in the sender's slice. Backward: gradients of imports with no export below them in the sender's slice.
        send_waiting, receive_waiting: of what the sender has after it received something itself.
    """

    send_ready: tuple[StateMessage, ...]
    send_waiting: tuple[StateMessage, ...]
    receive_ready: tuple[StateMessage, ...]
    receive_waiting: tuple[StateMessage, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineLinks:
    """One rank's part of a pipelined scan.

    Forward, exports are sent and imports received; backward, gradients of imports are sent and those of exports
    received.

    Attributes:
        forward, backward: the messages of each block of heads.
        num_blocks: of heads; fewer where there are not as many key heads.
    """

    forward: PipelineDirection
    backward: PipelineDirection
    num_blocks: int


def longest_chain(forest: CutForest) -> int:
    """Slices of which each waits for a state of the one before it, at most.

    Example:
        >>> from deltamesh.plan.slices import cut_forest
        >>> longest_chain(cut_forest(np.array([-1]), np.array([0]), np.array([9]), np.array([0, 3, 3, 9])))
        2
    """
    depth: dict[int, int] = {}  # per boundary state, sources first
    for b in forest.exports.tolist():
        depth[b] = depth.get(int(forest.entry[b]), 0) + 1
    return max(depth.values(), default=0) + 1


def plan_pipeline(forest: CutForest) -> list[PipelineLinks]:
    """The messages of every slice.

    Example:
        >>> from deltamesh.plan.slices import cut_forest
        >>> forest = cut_forest(np.array([-1]), np.array([0]), np.array([9]), np.array([0, 3, 6, 9]))
        >>> [(m.peer, m.states.tolist()) for m in plan_pipeline(forest)[1].forward.send_waiting]
        [(2, [0])]
    """
    ranks = range(forest.num_slices)
    # Waiting costs a block for each slice in the chain, and every block costs some 2% (CPU).
    num_blocks = 4 if longest_chain(forest) <= 2 else 8
    owner = forest.rank[forest.exports]
    enters = forest.entry[forest.exports] >= 0  # per export: its path enters the owner's slice
    exports = [forest.exports[owner == r] for r in ranks]
    imports = [forest.imports(r) for r in ranks]
    # per rank: imports above one of its exports, whose gradient waits for that export's
    awaited = [np.unique(forest.entry[forest.exports[(owner == r) & enters]]) for r in ranks]

    def shared(sender: int, receiver: int, *, through: bool) -> Ints:
        """Boundary states of the sender that the receiver continues."""
        own: Ints = forest.exports[(owner == sender) & (enters == through)]
        states: Ints = np.intersect1d(own, imports[receiver], assume_unique=True)
        return states

    def returned(importer: int, exporter: int, *, waits: bool) -> Ints:
        both: Ints = np.intersect1d(imports[importer], exports[exporter], assume_unique=True)
        states: Ints = both[np.isin(both, awaited[importer]) == waits]
        return states

    return [
        PipelineLinks(
            forward=PipelineDirection(
                send_ready=_messages(exports[me], [shared(me, p, through=False) for p in ranks]),
                send_waiting=_messages(exports[me], [shared(me, p, through=True) for p in ranks]),
                receive_ready=_messages(imports[me], [shared(p, me, through=False) for p in ranks]),
                receive_waiting=_messages(imports[me], [shared(p, me, through=True) for p in ranks]),
            ),
            backward=PipelineDirection(
                send_ready=_messages(imports[me], [returned(me, p, waits=False) for p in ranks]),
                send_waiting=_messages(imports[me], [returned(me, p, waits=True) for p in ranks]),
                receive_ready=_messages(exports[me], [returned(p, me, waits=False) for p in ranks]),
                receive_waiting=_messages(exports[me], [returned(p, me, waits=True) for p in ranks]),
            ),
            num_blocks=num_blocks,
        )
        for me in ranks
    ]


def _messages(among: Ints, by_peer: list[Ints]) -> tuple[StateMessage, ...]:
    return tuple(
        StateMessage(peer=peer, states=np.searchsorted(among, states))
        for peer, states in enumerate(by_peer)
        if len(states)
    )
