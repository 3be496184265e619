"""Links: which boundary states and transitions travel between slices for the scan, and how they are folded.

Every boundary state b obeys S_b = M_b S_src(b) + E_b, where src(b) is the boundary state through which the path to b
enters b's slice (S_b = E_b where the path starts inside). Slices of src(b), src(src(b)), ... strictly descend, so a
fold needs at most P - 1 steps in a row, whatever the depth of the tree.
"""

from dataclasses import dataclass

import numpy as np

from deltamesh.plan.pieces import Ints
from deltamesh.plan.slices import CutForest


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldStep:
    """All known boundary states that continue the same source: S[states] = M[states] S[source] + E[states]."""

    source: int
    states: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Direction:
    """One rank's messages of one direction (forward or backward) and the fold of what it then knows.

    The boundary states that the rank knows after the exchange are numbered 0 .. num_known, in stream order.

    Attributes:
        send_states: per peer, positions in this rank's list of outgoing states (forward: its exports; backward: its
            imports, whose gradients it sends).
        send_transitions: per peer, positions in this rank's transitions (`Pieces.through` order).
        recv_states: per peer, known states whose E (forward) or gradient (backward) arrives.
        recv_transitions: per peer, known states whose M arrives.
        num_known: number of known states.
        steps: the fold, sources before what continues them. Backward runs it in reverse, transposed.
        result: known states that the rank wanted (forward: its imports; backward: its exports).
    """

    send_states: tuple[Ints, ...]
    send_transitions: tuple[Ints, ...]
    recv_states: tuple[Ints, ...]
    recv_transitions: tuple[Ints, ...]
    num_known: int
    steps: tuple[FoldStep, ...]
    result: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class ScanLinks:
    """One rank's part of the scan's two exchanges."""

    forward: Direction
    backward: Direction


def plan_links(forest: CutForest) -> list[ScanLinks]:
    """The scan's exchanges, for every slice.

    Forward, the owner of b sends (E_b[, M_b]) to every slice that continues b or a state whose source chain holds b.
    Backward, a slice sends the gradient of each import to the owners of its source chain, and the owner of b sends
    M_b to the owners of the chain above b.
    """
    ranks = forest.num_slices
    exports = forest.exports
    owner = forest.rank[exports]
    source = _positions(exports, forest.entry[exports])
    imports = [np.searchsorted(exports, forest.imports(r)) for r in range(ranks)]
    through = [np.flatnonzero((owner == r) & (source >= 0)) for r in range(ranks)]
    own = [np.flatnonzero(owner == r) for r in range(ranks)]

    chains = _chains(source)  # per export: itself and everything above it
    needs = [_union([chains[b] for b in imports[r]]) for r in range(ranks)]
    # gradients of an import p go to the owners of chains[p]; M_b goes to the owners of the chain above b
    gradient_owners = [set(owner[chain].tolist()) for chain in chains]
    transition_owners = [set(owner[chain[:-1]].tolist()) for chain in chains]
    gradient_to = [[_owned_by(o, imports[r], gradient_owners) for o in range(ranks)] for r in range(ranks)]
    transition_to = [[_owned_by(o, through[r], transition_owners) for o in range(ranks)] for r in range(ranks)]

    links = []
    for me in range(ranks):
        known = needs[me]
        forward = _direction(
            sent_states=[_among(needs[peer], own[me]) for peer in range(ranks)],
            sent_transitions=[_among(needs[peer], through[me]) for peer in range(ranks)],
            received_states=[_among(known, own[peer]) for peer in range(ranks)],
            received_transitions=[_among(known, through[peer]) for peer in range(ranks)],
            outgoing=own[me],
            transitions=through[me],
            known=known,
            source=source,
            wanted=imports[me],
        )
        arriving = [gradient_to[peer][me] for peer in range(ranks)]
        moves = [transition_to[peer][me] for peer in range(ranks)]
        backward = _direction(
            sent_states=gradient_to[me],
            sent_transitions=transition_to[me],
            received_states=arriving,
            received_transitions=moves,
            outgoing=imports[me],
            transitions=through[me],
            known=_union([own[me], *arriving, *moves]),
            source=source,
            wanted=own[me],
        )
        links.append(ScanLinks(forward=forward, backward=backward))
    return links


def _direction(
    *,
    sent_states: list[Ints],
    sent_transitions: list[Ints],
    received_states: list[Ints],
    received_transitions: list[Ints],
    outgoing: Ints,
    transitions: Ints,
    known: Ints,
    source: Ints,
    wanted: Ints,
) -> Direction:
    return Direction(
        send_states=tuple(np.searchsorted(outgoing, part) for part in sent_states),
        send_transitions=tuple(np.searchsorted(transitions, part) for part in sent_transitions),
        recv_states=tuple(np.searchsorted(known, part) for part in received_states),
        recv_transitions=tuple(np.searchsorted(known, part) for part in received_transitions),
        num_known=len(known),
        steps=_fold_steps(known, _union(received_transitions), source),
        result=np.searchsorted(known, wanted),
    )


def _fold_steps(known: Ints, continuing: Ints, source: Ints) -> tuple[FoldStep, ...]:
    """Groups the states that arrived with a transition by their source; stream order puts sources first."""
    sources = source[continuing]
    return tuple(
        FoldStep(source=int(np.searchsorted(known, s)), states=np.searchsorted(known, continuing[sources == s]))
        for s in np.unique(sources)
    )


def _chains(source: Ints) -> list[Ints]:
    """Per boundary state, its source chain, ascending, itself last."""
    chains: list[Ints] = []
    for b, s in enumerate(source):
        chains.append(np.array([b]) if s < 0 else np.append(chains[s], b))
    return chains


def _owned_by(rank: int, states: Ints, owners: list[set[int]]) -> Ints:
    return np.array([b for b in states.tolist() if rank in owners[b]], dtype=np.int64)


def _positions(values: Ints, wanted: Ints) -> Ints:
    return np.where(wanted >= 0, np.searchsorted(values, wanted), -1)


def _among(needed: Ints, candidates: Ints) -> Ints:
    return np.intersect1d(needed, candidates, assume_unique=True)


def _union(parts: list[Ints]) -> Ints:
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))
