"""Plans: pure functions of the data, the same on every rank."""

from deltamesh.plan.cost import CostModel
from deltamesh.plan.cuts import balanced_cuts, quantile_cuts
from deltamesh.plan.exchange import RowExchange, plan_row_exchanges
from deltamesh.plan.links import Direction, FoldStep, ScanLinks, plan_links
from deltamesh.plan.pieces import Pieces, chain_pieces
from deltamesh.plan.plan import MicroBatchPlan, SlicePlan, plan_micro_batch
from deltamesh.plan.slices import CutForest, cut_forest

__all__ = [
    "CostModel",
    "CutForest",
    "Direction",
    "FoldStep",
    "MicroBatchPlan",
    "Pieces",
    "RowExchange",
    "ScanLinks",
    "SlicePlan",
    "balanced_cuts",
    "chain_pieces",
    "cut_forest",
    "plan_links",
    "plan_micro_batch",
    "plan_row_exchanges",
    "quantile_cuts",
]
