"""What stands between slices: a carrier brings boundary states in and takes their gradients out.

The engine runs one slice and knows no ranks. The carrier drives its phases, so that it can send and receive between
them: all heads at once around one exchange (`ExchangeCarrier`), or a block of heads after the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from deltamesh.ops.gated_delta_rule.blocks import BackwardBlock, ForwardBlock


class Carrier(Protocol):
    """Drives the phases of a slice and moves boundary states between the slices of a stream.

    A slice without rows, imports or exports is driven like any other, so that a carrier may enter a collective there.
    """

    @property
    def num_blocks(self) -> int:
        """Blocks of heads that the carrier wants, fewer where there are not as many key heads."""
        ...

    def run_forward(self, blocks: Sequence[ForwardBlock]) -> None:
        """Runs every engine to its end and leaves `incoming` in every block."""
        ...

    def run_backward(self, blocks: Sequence[BackwardBlock]) -> None:
        """Runs every backward to its end and leaves `d_given` in every block."""
        ...


class ExchangeCarrier(ABC):
    """All heads in one block around one exchange each way; `incoming` and `outgoing_gradient` are it.

    Both begin an exchange and return a function that waits for its result: the slice works on in between. Letters as in
    `blocks`.
    """

    num_blocks = 1

    @abstractmethod
    def incoming(self, states: Tensor, transitions: Tensor) -> Callable[[], Tensor]:
        """Brings the true states of the carried slots, [Y, H, K, V].

        Args:
            states: [X, H, K, V], the true state of each export, or for a through export E, the state it would have if
                its slot held zero. The true state of a through export is `E + M @ state_of_its_slot`.
            transitions: M [W, H, K, K] of the through exports, in the order of the exports.
        """

    @abstractmethod
    def outgoing_gradient(self, d_incoming: Tensor, transitions: Tensor) -> Callable[[], Tensor]:
        """Brings the whole gradient of each export, [X, H, K, V].

        Args:
            d_incoming: [Y, H, K, V], the gradient of each carried slot with the gradients of all exports taken as zero.
                The whole gradient of a slot is that plus `M^T @ d_export` over the through exports that enter at it.
            transitions: as in `incoming`.
        """

    def run_forward(self, blocks: Sequence[ForwardBlock]) -> None:
        """Calls `incoming` exactly once, with zero states if need be."""
        for block in blocks:
            engine = block.engine
            engine.before_exchange(block.out, block.given)
            through_states, block.transitions = engine.transitions()
            wait = self.incoming(engine.exported(through_states), block.transitions)
            engine.during_exchange(block.out, block.given)
            engine.after_exchange(block.out, block.receive(wait(), self))

    def run_backward(self, blocks: Sequence[BackwardBlock]) -> None:
        """Calls `outgoing_gradient` exactly once, with zero states if need be."""
        for block in blocks:
            phases = block.phases
            wait = self.outgoing_gradient(phases.before_exchange(), block.transitions)
            phases.during_exchange()
            block.d_given = phases.after_exchange(wait())


class LocalCarrier(ExchangeCarrier):
    """The carrier of a slice that is the whole stream: nothing enters, nothing leaves."""

    def incoming(self, states: Tensor, transitions: Tensor) -> Callable[[], Tensor]:
        """Brings no states; raises ValueError if the slice exports any."""
        if len(states):
            raise ValueError(f"this slice exports {len(states)} states but LocalCarrier has no peer; give a carrier")
        return lambda: states

    def outgoing_gradient(self, d_incoming: Tensor, transitions: Tensor) -> Callable[[], Tensor]:
        """Brings no gradients; raises ValueError if the slice has carried slots."""
        if len(d_incoming):
            raise ValueError(
                f"this slice imports {len(d_incoming)} states but LocalCarrier has no peer; give a carrier"
            )
        return lambda: d_incoming
