"""What stands between slices: a carrier brings boundary states in and takes their gradients out.

The engine runs one slice and knows no ranks. It calls `incoming` exactly once in every forward and
`outgoing_gradient` exactly once in every backward, with zero rows, states or slots if need be, so that a carrier may
enter a collective there.
"""

from typing import Protocol

from torch import Tensor


class Carrier(Protocol):
    """Moves boundary states between the slices of a stream.

    Letters: X exports of this slice, W of them "through" (their path enters this slice at a carried slot), Y carried
    slots (all slots but the given ones), H value heads, K key dim, V value dim. All tensors are fp32, or fp64.
    """

    def incoming(self, states: Tensor, transitions: Tensor) -> Tensor:
        """Gives the true states of the carried slots, [Y, H, K, V].

        Args:
            states: [X, H, K, V], the true state of each export, or for a through export E, the state it would have if
                its slot held zero. The true state of a through export is `E + M @ state_of_its_slot`.
            transitions: M [W, H, K, K] of the through exports, in the order of the exports.
        """
        ...

    def outgoing_gradient(self, d_incoming: Tensor, transitions: Tensor) -> Tensor:
        """Gives the whole gradient of each export, [X, H, K, V].

        Args:
            d_incoming: [Y, H, K, V], the gradient of each carried slot with the gradients of all exports taken as zero.
                The whole gradient of a slot is that plus `M^T @ d_export` over the through exports that enter at it.
            transitions: as in `incoming`.
        """
        ...


class LocalCarrier:
    """The carrier of a slice that is the whole stream: nothing enters, nothing leaves."""

    def incoming(self, states: Tensor, transitions: Tensor) -> Tensor:
        """Returns no states; raises ValueError if the slice exports any."""
        if len(states):
            raise ValueError(f"this slice exports {len(states)} states but LocalCarrier has no peer; give a carrier")
        return states

    def outgoing_gradient(self, d_incoming: Tensor, transitions: Tensor) -> Tensor:
        """Returns no gradients; raises ValueError if the slice has carried slots."""
        if len(d_incoming):
            raise ValueError(
                f"this slice imports {len(d_incoming)} states but LocalCarrier has no peer; give a carrier"
            )
        return d_incoming
