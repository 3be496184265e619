"""The gated delta rule: chains, packed sequences, prefix trees, and slices of them."""

from deltamesh.ops.gated_delta_rule.carrier import Carrier as Carrier
from deltamesh.ops.gated_delta_rule.carrier import ExchangeCarrier as ExchangeCarrier
from deltamesh.ops.gated_delta_rule.carrier import LocalCarrier as LocalCarrier
from deltamesh.ops.gated_delta_rule.context import ScanContext as ScanContext
from deltamesh.ops.gated_delta_rule.context_parallel import ContextParallel as ContextParallel
from deltamesh.ops.gated_delta_rule.context_parallel import context_parallel as context_parallel
from deltamesh.ops.gated_delta_rule.naive import naive_gated_delta_rule as naive_gated_delta_rule
from deltamesh.ops.gated_delta_rule.op import gated_delta_rule as gated_delta_rule
from deltamesh.ops.gated_delta_rule.schedule import Schedule as Schedule
