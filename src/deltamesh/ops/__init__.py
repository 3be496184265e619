"""Ops: each a naive version beside a fast one; none knows the topology beyond the groups it is handed."""

from deltamesh.ops.causal_conv1d import causal_conv1d
from deltamesh.ops.gated_delta_rule import context_parallel, gated_delta_rule
from deltamesh.ops.target_logprobs import target_logprobs
from deltamesh.ops.tree_attention import tree_attention

__all__ = ["causal_conv1d", "context_parallel", "gated_delta_rule", "target_logprobs", "tree_attention"]
