"""The order in which programs of the CUDA path visit pieces."""

import numpy as np
import pytest
from hypothesis import given, settings

from deltamesh.ops.gated_delta_rule.cuda.walks import KEEP, NOTHING, Split, choose_split, make_jobs
from deltamesh.plan.pieces import Pieces
from tests.forests import Forest, forests


def pieces_of(forest: Forest) -> Pieces:
    none = np.full(len(forest.parent), -1)
    return Pieces(
        start=forest.start, length=forest.length, parent=forest.parent, slot=none, num_slots=0, exports=none[:0]
    )


@pytest.mark.parametrize("split", ["tree", "chains"])
@settings(max_examples=60, deadline=None)
@given(forest=forests())
def test_every_piece_is_visited_once_and_finds_its_parents_state(split: Split, forest: Forest) -> None:
    pieces = pieces_of(forest)
    n = len(pieces.start)
    jobs = make_jobs(pieces, np.full(n, True), wanted=[0, n - 1], split=split)
    saved_in: dict[int, int] = {}  # piece -> wave
    seen: list[int] = []
    assert {0, n - 1} <= jobs.saved.keys()
    for wave_number, wave in enumerate(jobs.waves):
        for job in wave:
            held = -1
            for visit in job:
                parent = int(pieces.parent[visit.piece])
                if visit.source == KEEP:
                    assert held == parent >= 0
                elif visit.source == NOTHING:
                    assert parent == -1
                else:
                    assert visit.source == jobs.saved[parent]
                    assert held != -1 or saved_in[parent] < wave_number  # by this program, or by an earlier launch
                held = visit.piece
                seen.append(visit.piece)
                saved_in[visit.piece] = wave_number
    assert sorted(seen) == list(range(n))
    assert (len(jobs.waves) == 1) if split == "tree" else (len(jobs.waves) <= np.log2(n) + 1)


def test_a_prompt_with_long_completions_runs_side_by_side_on_an_idle_device() -> None:
    lengths = np.array([4096] + 16 * [1024])
    none = np.full(17, -1)
    pieces = Pieces(
        start=np.cumsum(lengths) - lengths, length=lengths, parent=np.array([-1] + 16 * [0]), slot=none, num_slots=0,
        exports=none[:0],
    )  # fmt: skip
    assert choose_split(pieces, programs_per_job=16, num_multiprocessors=132) == "chains"
    assert choose_split(pieces, programs_per_job=16 * 132, num_multiprocessors=132) == "tree"
