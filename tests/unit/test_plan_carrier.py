"""The choice of a carrier: a pure rule whose answers follow from what each way pays for."""

import numpy as np
import pytest

from deltamesh.plan import CostModel, RuleShape, choose_carrier, cut_forest, plan_micro_batch
from deltamesh.plan.carrier import pipeline_seconds, scan_seconds
from deltamesh.plan.links import ScanLinks
from deltamesh.plan.pipeline import PipelineLinks, longest_chain
from deltamesh.plan.slices import CutForest


def chain(rows: int, ranks: int) -> CutForest:
    return cut_forest(np.array([-1]), np.array([0]), np.array([rows]), np.arange(ranks + 1) * rows // ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_long_chains_over_few_slices_are_pipelined(ranks: int) -> None:
    assert choose_carrier(chain(8192, ranks), "auto", RuleShape()) == "pipeline"


def test_many_slices_of_a_chain_are_scanned() -> None:
    """Waiting grows with the number of slices, the price of M does not."""
    assert choose_carrier(chain(16 * 1024, 16), "auto", RuleShape()) == "scan"


def test_few_rows_are_scanned_because_messages_cost_more_than_work() -> None:
    tiny = RuleShape(heads=4, key_heads=2, key_dim=8, value_dim=8)
    assert choose_carrier(chain(64, 4), "auto", tiny) == "scan"


def test_one_slice_runs_all_heads_at_once() -> None:
    assert choose_carrier(chain(8192, 1), "auto", RuleShape()) == "scan"


def test_few_key_heads_make_long_waits() -> None:
    """With one key head there is one block, and the slices of a chain run one after another."""
    assert choose_carrier(chain(8192, 4), "auto", RuleShape(heads=4, key_heads=1)) == "scan"


def test_predicted_waits_are_those_of_a_pipeline() -> None:
    """(P - 1 + blocks) / blocks of the work of a slice, for long slices; without waiting, the work itself."""
    rows, shape = 1 << 20, RuleShape()
    work = pipeline_seconds(chain(rows // 4, 1), shape)
    waits = pipeline_seconds(chain(rows, 4), shape) / work
    assert waits == pytest.approx((4 - 1 + 8) / 8 * 1.14 / 1.06, rel=0.06)
    assert scan_seconds(chain(rows // 4, 1), shape) < work * 1.0001


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_longest_chain_counts_slices_that_wait_for_each_other(ranks: int) -> None:
    assert longest_chain(chain(100, ranks)) == ranks


def test_a_prompt_with_completions_on_many_slices_is_a_chain_of_two() -> None:
    forest = cut_forest(np.array([-1, 0, 0, 0]), np.array([0, 4, 8, 12]), np.full(4, 4), np.arange(5) * 4)
    assert longest_chain(forest) == 2


def test_the_plan_of_a_pipeline_has_no_transitions_in_its_cost_and_another_digest() -> None:
    tokens = [np.arange(300)]
    base = {"num_slices": 4, "conv_width": 4, "cost": CostModel(row=10.0, through=5.0)}
    scan, pipeline = (plan_micro_batch(tokens, [None], **base, carrier=c) for c in ("scan", "pipeline"))  # type: ignore[arg-type]
    assert (scan.carrier, pipeline.carrier) == ("scan", "pipeline")
    assert scan.digest != pipeline.digest
    assert all(isinstance(s.links, ScanLinks) for s in scan.slices)
    assert all(isinstance(s.links, PipelineLinks) for s in pipeline.slices)
    assert pipeline.forest.cuts.tolist() == [0, 75, 150, 225, 300]
    assert scan.forest.cuts.tolist() != pipeline.forest.cuts.tolist()
    assert pipeline.work == (750.0,) * 4


def test_an_unknown_carrier_is_refused() -> None:
    with pytest.raises(ValueError, match="carrier='ring' is not known; use one of auto, scan, pipeline"):
        choose_carrier(chain(8, 2), "ring", RuleShape())
