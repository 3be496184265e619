"""Ops: each a naive version beside a fast one; none knows the topology beyond the groups it is handed."""
