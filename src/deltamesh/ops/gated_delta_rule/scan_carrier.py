"""The `scan` carrier: boundary states of all slices by one exchange and a local fold, in each direction.

Letters: n boundary states, H value heads, K key dim, V value dim.
Forward: S_b = M_b S_src(b) + E_b over what arrived. Backward, transposed and in reverse: dS_src(b) += M_b^T dS_b.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deltamesh.distributed.collectives import Group, start_all_to_all_rows
from deltamesh.ops.gated_delta_rule.carrier import ExchangeCarrier
from deltamesh.ops.precision import full_precision_matmul
from deltamesh.plan.links import Direction, ScanLinks
from deltamesh.plan.pieces import Ints


class ScanCarrier(ExchangeCarrier):
    """Carries boundary states between the slices of a cp group, with one message to each peer and direction.

    Args:
        links: this rank's part of the plan.
        group: the cp group.
        device: where the states live.
    """

    def __init__(self, links: ScanLinks, group: Group, device: torch.device) -> None:
        self._group = group
        self._forward = _DeviceDirection.from_plan(links.forward, device)
        self._backward = _DeviceDirection.from_plan(links.backward, device)

    def incoming(self, states: Tensor, transitions: Tensor) -> Callable[[], Tensor]:
        """True states of this slice's imports.

        Args:
            states: [n_exports, H, K, V], the state of an export whose path starts in the slice, else its E.
            transitions: [n_through, H, K, K], M of the exports whose path enters the slice.

        Returns:
            A function that waits for [n_imports, H, K, V].
        """
        way = self._forward
        exchange = _Exchange(way, self._group, states, transitions)

        def wait() -> Tensor:
            known, moves = exchange.wait()
            with full_precision_matmul():
                for source, targets, rows in way.steps:
                    known[targets] = known[targets] + moves[rows] @ known[source]
            return known[way.result]

        return wait

    def outgoing_gradient(self, d_incoming: Tensor, transitions: Tensor) -> Callable[[], Tensor]:
        """Gradients of this slice's exported states.

        Args:
            d_incoming: [n_imports, H, K, V], gradients of the imports with the exported gradients set to zero.
            transitions: as in `incoming`.

        Returns:
            A function that waits for [n_exports, H, K, V], everything that later slices owe.
        """
        way = self._backward
        exchange = _Exchange(way, self._group, d_incoming, transitions)

        def wait() -> Tensor:
            known, moves = exchange.wait()
            with full_precision_matmul():
                for source, targets, rows in reversed(way.steps):
                    known[source] += (moves[rows].mT @ known[targets]).sum(0)
            return known[way.result]

        return wait


class _Exchange:
    """States and transitions on their way to all slices of the group."""

    def __init__(self, way: "_DeviceDirection", group: Group, states: Tensor, transitions: Tensor) -> None:
        self._way, self._shape = way, states.shape[1:]
        heads, key_dim, value_dim = self._shape
        state_size, move_size = heads * key_dim * value_dim, heads * key_dim * key_dim
        parts = [
            part
            for sent, moved in zip(way.send_states, way.send_transitions, strict=True)
            for part in (states[sent].reshape(-1), transitions[moved].reshape(-1))
        ]
        send_splits = [
            len(sent) * state_size + len(moved) * move_size
            for sent, moved in zip(way.send_states, way.send_transitions, strict=True)
        ]
        self._sizes = [
            size
            for got, moved in zip(way.recv_states, way.recv_transitions, strict=True)
            for size in (len(got) * state_size, len(moved) * move_size)
        ]
        recv_splits = [a + b for a, b in zip(self._sizes[::2], self._sizes[1::2], strict=True)]
        self._arriving = start_all_to_all_rows(torch.cat(parts), send_splits, recv_splits, group)

    def wait(self) -> tuple[Tensor, Tensor]:
        """The sums of the known states [n_known, H, K, V] and the transitions that arrived [m, H, K, K]."""
        arrived = self._arriving.wait().split(self._sizes)
        heads, key_dim, _ = self._shape
        known = arrived[0].new_zeros((self._way.num_known, *self._shape))
        for rows, part in zip(self._way.recv_states, arrived[::2], strict=True):
            known.index_add_(0, rows, part.view(-1, *self._shape))
        return known, torch.cat([part.view(-1, heads, key_dim, key_dim) for part in arrived[1::2]])


@dataclass(frozen=True, kw_only=True, eq=False)
class _DeviceDirection:
    """A `Direction` with its indices on the device; steps are (source, states, rows among the arrived transitions)."""

    send_states: list[Tensor]
    send_transitions: list[Tensor]
    recv_states: list[Tensor]
    recv_transitions: list[Tensor]
    num_known: int
    steps: list[tuple[int, Tensor, Tensor]]
    result: Tensor

    @staticmethod
    def from_plan(plan: Direction, device: torch.device) -> "_DeviceDirection":
        def put(index: Ints) -> Tensor:
            return torch.from_numpy(index).to(device)

        arrival = {int(b): row for row, b in enumerate(b for part in plan.recv_transitions for b in part)}
        return _DeviceDirection(
            send_states=[put(part) for part in plan.send_states],
            send_transitions=[put(part) for part in plan.send_transitions],
            recv_states=[put(part) for part in plan.recv_states],
            recv_transitions=[put(part) for part in plan.recv_transitions],
            num_known=plan.num_known,
            steps=[
                (s.source, put(s.states), torch.tensor([arrival[b] for b in s.states.tolist()], device=device))
                for s in plan.steps
            ],
            result=put(plan.result),
        )
