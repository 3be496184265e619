"""The messages of the pipeline against brute force over rows."""

import numpy as np
from hypothesis import given, settings

from deltamesh.plan.pipeline import PipelineDirection, StateMessage, plan_pipeline
from deltamesh.plan.slices import cut_forest
from tests.forests import Forest, forests, make_forest

Sent = dict[tuple[int, int, bool], list[int]]
"""Last rows of states by (sender, receiver, whether the sender waits for something)."""


def expected(forest: Forest) -> tuple[Sent, Sent]:
    """Forward and backward, row by row."""
    before = forest.predecessors()
    rank = np.searchsorted(forest.cuts, np.arange(forest.num_rows), side="right") - 1
    crossings = {
        (before[t], int(rank[t])) for t in range(forest.num_rows) if before[t] >= 0 and rank[before[t]] != rank[t]
    }

    def entry(row: int) -> int:
        """The row of an earlier slice through which the path to `row` enters its slice, or -1."""
        here = rank[row]
        while row >= 0 and rank[row] == here:
            row = before[row]
        return row

    exported = {row for row, _ in crossings}
    forward: Sent = {}
    backward: Sent = {}
    for row, receiver in sorted(crossings):
        owner = int(rank[row])
        forward.setdefault((owner, receiver, entry(row) >= 0), []).append(row)
        waits = any(rank[below] == receiver and entry(below) == row for below in exported)
        backward.setdefault((receiver, owner, waits), []).append(row)
    return forward, backward


def found(forest: Forest) -> tuple[Sent, Sent]:
    """The plan's messages, each seen from its sender and from its receiver alike."""
    cut = cut_forest(forest.parent, forest.start, forest.length, forest.cuts)
    last = cut.start + cut.length - 1
    exports = [last[cut.exports[cut.rank[cut.exports] == r]] for r in range(cut.num_slices)]
    imports = [last[cut.imports(r)] for r in range(cut.num_slices)]
    links = plan_pipeline(cut)

    def gather(directions: list[PipelineDirection], sent: list[np.ndarray], got: list[np.ndarray]) -> Sent:
        by_sender: Sent = {}
        by_receiver: Sent = {}
        for me, way in enumerate(directions):
            for waits, out, into in (
                (False, way.send_ready, way.receive_ready),
                (True, way.send_waiting, way.receive_waiting),
            ):
                assert [m.peer for m in out] == sorted({m.peer for m in out})
                by_sender |= {(me, m.peer, waits): _rows(m, sent[me]) for m in out}
                by_receiver |= {(m.peer, me, waits): _rows(m, got[me]) for m in into}
        assert by_sender == by_receiver
        return by_sender

    return (
        gather([x.forward for x in links], exports, imports),
        gather([x.backward for x in links], imports, exports),
    )


def _rows(message: StateMessage, among: np.ndarray) -> list[int]:
    rows: list[int] = among[message.states].tolist()
    assert rows
    return rows


@settings(max_examples=200, deadline=None)
@given(forest=forests() | forests(max_nodes=30, max_length=2, max_slices=8))
def test_states_go_to_their_direct_importers_and_gradients_return(forest: Forest) -> None:
    assert found(forest) == expected(forest)


def test_a_chain_sends_one_state_from_each_slice_to_the_next_that_has_rows() -> None:
    forest = make_forest([-1], [12], [0.0, 0.25, 0.25, 0.5])
    forward, backward = found(forest)
    assert forward == {(1, 3, False): [2], (3, 4, True): [5]}
    assert backward == {(4, 3, False): [5], (3, 1, True): [2]}


def test_a_prompt_goes_to_every_slice_that_has_a_completion_of_it() -> None:
    forest = make_forest([-1, 0, 0, 0], [4, 3, 3, 3], [0.3, 0.5, 0.75])
    forward, _ = found(forest)
    assert {receiver for sender, receiver, _ in forward if sender == 0} == {1, 2, 3}
