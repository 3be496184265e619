"""The `pipeline` carrier: true boundary states flow from rank to rank, a block of heads after the other.

No transition is computed and nothing is computed twice. A rank does what waits for nobody first, then, block by block:
receives, runs what waited, sends. Forward flows towards later ranks, backward towards earlier ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deltamesh.distributed.collectives import Group, Pending, start_receive, start_send
from deltamesh.ops.gated_delta_rule.blocks import BackwardBlock, ForwardBlock
from deltamesh.plan.pipeline import PipelineDirection, PipelineLinks, StateMessage


class PipelineCarrier:
    """Carries true boundary states between the slices of a cp group, straight to the ranks that continue them.

    A message of no states is not sent: both sides know the plan. Gradients of a state that several ranks continue are
    added in one order, the last rank's first.

    Args:
        links: this rank's part of the plan.
        group: the cp group.
    """

    def __init__(self, links: PipelineLinks, group: Group) -> None:
        self.num_blocks = links.num_blocks
        self._links = links
        self._group = group

    def run_forward(self, blocks: Sequence[ForwardBlock]) -> None:
        """See `Carrier`."""
        way = self._links.forward
        mail = Mail(way, self._group, [block.given for block in blocks])
        for n, block in enumerate(blocks):
            block.engine.run_local(block.out, block.given, exporting=True)
            mail.send_ready(n, [block.engine.export_states(m.states.tolist()) for m in way.send_ready])
        for block in blocks:
            block.engine.prepare_entering()
        for n, block in enumerate(blocks):
            block.engine.run_local(block.out, block.given, exporting=False)
            incoming = block.receive(_in_order(mail.received(n), block), self)
            block.engine.run_entering(block.out, incoming, exporting=True)
            mail.send_waiting(n, [block.engine.export_states(m.states.tolist()) for m in way.send_waiting])
            block.engine.run_entering(block.out, incoming, exporting=False)
        mail.close()

    def run_backward(self, blocks: Sequence[BackwardBlock]) -> None:
        """See `Carrier`."""
        way = self._links.backward
        mail = Mail(way, self._group, [block.phases.incoming for block in blocks])
        for n, block in enumerate(blocks):
            block.phases.run(entering=True, exporting=False)
            mail.send_ready(n, _import_gradients(block, way.send_ready))
        for n, block in enumerate(blocks):
            phases = block.phases
            phases.run(entering=False, exporting=False)
            for exports, gradients in mail.received(n):
                phases.add_export_gradients(gradients, exports)
            phases.run(entering=True, exporting=True)
            mail.send_waiting(n, _import_gradients(block, way.send_waiting))
            phases.run(entering=False, exporting=True)
            block.d_given = phases.finish()
        mail.close()


def _in_order(received: Sequence[tuple[list[int], Tensor]], block: ForwardBlock) -> Tensor:
    """The carried states [Y, H, K, V]; each comes from its owner alone."""
    found = {place: state for places, states in received for place, state in zip(places, states, strict=True)}
    states = [found[place] for place in sorted(found)]
    return torch.stack(states) if states else block.given.new_empty(0, *block.given.shape[1:])


def _import_gradients(block: BackwardBlock, messages: Sequence[StateMessage]) -> list[Tensor]:
    num_given = block.phases.engine.schedule.num_given
    return [block.phases.slot_gradients((num_given + m.states).tolist()) for m in messages]


class Mail:
    """The messages of one pass in one direction.

    All messages of all ranks have one order: ready ones before waiting ones, then by block, then by sender (the one
    that everything flows away from first). Every rank begins its own in this order, so no backend can wait in a circle.
    Receives are begun as early as that allows: as far as the next send.

    Args:
        way: the plan.
        group: the cp group.
        like: per block a tensor [_, H, K, V] with the shape and type of its states.
    """

    def __init__(self, way: PipelineDirection, group: Group, like: Sequence[Tensor]) -> None:
        self._way, self._group, self._like = way, group, like
        self._sent: list[Pending] = []
        self._arriving: list[list[tuple[StateMessage, Pending]]] = [[] for _ in like]
        blocks = range(len(like))
        ready = [(block, way.receive_ready, bool(way.send_ready)) for block in blocks]
        waiting = [(block, way.receive_waiting, bool(way.send_waiting)) for block in blocks]
        self._turns = iter(ready + waiting)
        self._receive_until_next_send()

    def send_ready(self, block: int, states: Sequence[Tensor]) -> None:
        """Sends a block of what waited for nobody, a contiguous tensor for each message of the plan."""
        self._send(self._way.send_ready, states)

    def send_waiting(self, block: int, states: Sequence[Tensor]) -> None:
        """Sends a block of what waited for states of other ranks."""
        self._send(self._way.send_waiting, states)

    def received(self, block: int) -> list[tuple[list[int], Tensor]]:
        """Waits for all states of a block: their positions and [n, H, K, V] from each peer, the last peer first."""
        arriving = sorted(self._arriving[block], key=lambda each: -each[0].peer)
        self._arriving[block] = []
        return [(message.states.tolist(), pending.wait()) for message, pending in arriving]

    def close(self) -> None:
        """Waits until everything has left."""
        for pending in self._sent:
            pending.wait()

    def _send(self, messages: Sequence[StateMessage], states: Sequence[Tensor]) -> None:
        for message, part in zip(messages, states, strict=True):
            self._sent.append(start_send(part, message.peer, self._group))
        if messages:
            self._receive_until_next_send()

    def _receive_until_next_send(self) -> None:
        for block, messages, sends in self._turns:
            for message in messages:
                place = self._like[block].new_empty((len(message.states), *self._like[block].shape[1:]))
                self._arriving[block].append((message, start_receive(place, message.peer, self._group)))
            if sends:
                return
