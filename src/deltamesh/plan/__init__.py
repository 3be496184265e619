"""Plans: pure functions of the data, the same on every rank."""

from deltamesh.plan.carrier import RuleShape, choose_carrier
from deltamesh.plan.cost import CostModel
from deltamesh.plan.cuts import balanced_cuts, quantile_cuts
from deltamesh.plan.exchange import RowExchange, plan_row_exchanges
from deltamesh.plan.links import Direction, FoldStep, ScanLinks, plan_links
from deltamesh.plan.pieces import Pieces, chain_pieces
from deltamesh.plan.pipeline import PipelineLinks, plan_pipeline
from deltamesh.plan.plan import MicroBatchPlan, SlicePlan, plan_micro_batch
from deltamesh.plan.slices import CutForest, cut_forest

__all__ = [
    "CostModel",
    "CutForest",
    "Direction",
    "FoldStep",
    "MicroBatchPlan",
    "Pieces",
    "PipelineLinks",
    "RowExchange",
    "RuleShape",
    "ScanLinks",
    "SlicePlan",
    "balanced_cuts",
    "chain_pieces",
    "choose_carrier",
    "cut_forest",
    "plan_links",
    "plan_micro_batch",
    "plan_pipeline",
    "plan_row_exchanges",
    "quantile_cuts",
]
