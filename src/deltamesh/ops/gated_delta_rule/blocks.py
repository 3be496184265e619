"""A block of the heads of a slice, as a carrier drives it. Heads are independent, so blocks may run at different times.

Letters: X exports of this slice, W of them "through" (their path enters this slice at a carried slot), Y carried slots
(all slots but the given ones), H value heads of the block, K key dim, V value dim. States are fp32, or fp64.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Which heads a block has, of Hk key heads with `per_key` value heads each."""

    key: slice
    per_key: int

    @property
    def value(self) -> slice:
        """Its value heads."""
        return slice(self.key.start * self.per_key, self.key.stop * self.per_key)

    def of(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Its part [T, h, ...] of each tensor [T, Hk or H, ...]: q and k have key heads, all others value heads."""
        return {name: x[:, self.key if name in ("q", "k") else self.value] for name, x in inputs.items()}

    @staticmethod
    def split(num_key_heads: int, num_value_heads: int, num_blocks: int) -> "Iterator[Heads]":
        """Blocks as equal as can be, of whole key heads and of at least two value heads where there are two.

        Products of a single head may be summed in another order than those of many.

        Example:
            >>> [heads.value for heads in Heads.split(3, 6, 2)]
            [slice(0, 2, None), slice(2, 6, None)]
        """
        count = max(1, min(num_blocks, num_key_heads, num_value_heads // 2))
        for n in range(count):
            key = slice(n * num_key_heads // count, (n + 1) * num_key_heads // count)
            yield Heads(key=key, per_key=num_value_heads // num_key_heads)


@dataclass(kw_only=True, eq=False)
class ForwardBlock:
    """The forward of a block.

    Attributes:
        engine: of a backend, see `SliceEngine`.
        out: [T, H, V], filled by the engine.
        given: [num_given, H, K, V].
        num_carried: Y.
        incoming: [num_given + Y, H, K, V], after `receive`.
        transitions: M [W, H, K, K] of the through exports, left by a carrier that needs them again in the backward.
    """

    engine: Any
    out: Tensor
    given: Tensor
    num_carried: int
    incoming: Tensor = field(init=False)
    transitions: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.transitions = self.given.new_empty(0)

    def receive(self, carried: Tensor, carrier: object) -> Tensor:
        """Keeps the true states of the carried slots [Y, H, K, V] and returns those of all slots.

        Raises:
            ValueError: `carrier`, which is named in the error, brought others than the slice imports.
        """
        wanted = (self.num_carried, *self.engine.state_shape)
        if tuple(carried.shape) != wanted:
            raise ValueError(
                f"{type(carrier).__name__} brought states of shape {tuple(carried.shape)} but the slice "
                f"imports {wanted}; give a carrier that serves every import"
            )
        self.incoming = torch.cat((self.given, carried.to(self.engine.dtype)))
        return self.incoming


@dataclass(kw_only=True, eq=False)
class BackwardBlock:
    """The backward of a block.

    Attributes:
        phases: of a backend, see `SliceBackward`.
        transitions: as the forward left them.
        d_given: gradients of the given states [num_given, H, K, V], left by the carrier.
    """

    phases: Any
    transitions: Tensor
    d_given: Tensor = field(init=False)
