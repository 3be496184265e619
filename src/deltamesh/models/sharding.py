"""Which part of every parameter a tp rank holds, and what its gradient there is worth. Pure shapes: no ranks needed.

Parameters are named as in Hugging Face's checkpoints. A sharded dimension consists of sections (q, k and v inside one
fused projection, for example); each section is dealt to the ranks by itself, so that every rank gets whole heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Ranges = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A run of a sharded dimension that is dealt to the tp ranks by itself, in order.

    Attributes:
        name: what the units are, for messages (a configuration field such as `linear_num_key_heads`).
        units: number of indivisible units (heads, columns, vocabulary rows).
        unit_size: length of one unit along the dimension.
        uneven: deal ceil(units / tp) units to each rank and fewer to the last ones, instead of equal parts.
        replicate: where tp exceeds `units`, give each unit to tp / units neighbouring ranks.
    """

    name: str
    units: int
    unit_size: int = 1
    uneven: bool = False
    replicate: bool = False

    @property
    def size(self) -> int:
        """Length along the dimension."""
        return self.units * self.unit_size

    def copies(self, tp_size: int) -> int:
        """Number of ranks that hold each element."""
        return tp_size // self.units if self.replicate and tp_size > self.units else 1

    def range(self, tp_rank: int, tp_size: int) -> tuple[int, int]:
        """[start, stop) of this rank inside the section.

        Raises:
            ValueError: the units cannot be dealt to `tp_size` ranks.
        """
        if self.uneven:
            each = -(-self.units // tp_size)
            first, last = min(tp_rank * each, self.units), min((tp_rank + 1) * each, self.units)
            if (tp_size - 1) * each >= self.units:
                raise ValueError(
                    f"tp={tp_size} leaves the last rank without a part of {self.name}={self.units} "
                    f"(blocks of {each}); use a smaller tp"
                )
        elif self.replicate and tp_size > self.units:
            if tp_size % self.units:
                raise ValueError(
                    f"tp={tp_size} is not a multiple of {self.name}={self.units}; use a tp that divides it or that it "
                    "divides"
                )
            first = tp_rank // (tp_size // self.units)
            last = first + 1
        else:
            if self.units % tp_size:
                choices = ", ".join(str(n) for n in range(1, self.units + 1) if self.units % n == 0)
                raise ValueError(f"tp={tp_size} does not divide {self.name}={self.units}; use tp in {{{choices}}}")
            each = self.units // tp_size
            first, last = tp_rank * each, (tp_rank + 1) * each
        return first * self.unit_size, last * self.unit_size


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter: its full shape and how it is laid over the tp ranks.

    Attributes:
        name: Hugging Face's name.
        shape: full shape.
        dim: the sharded dimension, or None where every rank holds the whole tensor.
        sections: sections of `dim`, in order; their sizes add up to shape[dim]. Empty when `dim` is None.
        partial: when the gradients on ranks that hold the same element are parts of one sum: "always", "sp" (only
            when rows are sharded over tp; otherwise each rank has the whole gradient already), or "never".
        keep_fp32: stays in fp32 in models of lower precision.

    Example:
        >>> q, v = Section(name="q", units=2), Section(name="v", units=4)
        >>> spec = ParamSpec(name="w", shape=(6, 3), dim=0, sections=(q, v))
        >>> spec.ranges(1, 2)
        [(1, 2), (4, 6)]
        >>> spec.local_shape(1, 2)
        (3, 3)
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    sections: tuple[Section, ...] = ()
    partial: Literal["always", "sp", "never"] = "always"
    keep_fp32: bool = False

    def __post_init__(self) -> None:
        if self.dim is not None:
            assert sum(s.size for s in self.sections) == self.shape[self.dim], self

    def ranges(self, tp_rank: int, tp_size: int) -> Ranges:
        """[start, stop) runs of the full tensor's `dim` that this rank holds, in the order in which it holds them.

        For a parameter that is not sharded: the whole of dim 0.

        Raises:
            ValueError: `tp_size` cannot deal out the heads.
        """
        if self.dim is None:
            return [(0, self.shape[0])]
        out, offset = [], 0
        for section in self.sections:
            start, stop = section.range(tp_rank, tp_size)
            out.append((offset + start, offset + stop))
            offset += section.size
        return out

    def local_shape(self, tp_rank: int, tp_size: int) -> tuple[int, ...]:
        """Shape of this rank's part."""
        if self.dim is None:
            return self.shape
        length = sum(stop - start for start, stop in self.ranges(tp_rank, tp_size))
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def copies(self, tp_size: int) -> int:
        """Number of tp ranks that hold each element. A sum of squares over ranks counts each element this often."""
        if self.dim is None:
            return tp_size
        counts = {section.copies(tp_size) for section in self.sections}
        assert len(counts) == 1, self  # sections of one parameter are replicated together or not at all
        return counts.pop()

    def partial_over_tp(self, *, sp: bool) -> bool:
        """Whether the gradient of an element held by several ranks must be summed over those ranks."""
        return self.partial == "always" or (self.partial == "sp" and sp)

    def needs_tp_sum(self, tp_size: int, *, sp: bool) -> bool:
        """Whether a gradient sum over tp is due: some element is on several ranks, each with a part of its gradient."""
        return self.copies(tp_size) > 1 and self.partial_over_tp(sp=sp)


def take_local(full: Tensor, spec: ParamSpec, tp_rank: int, tp_size: int) -> Tensor:
    """This rank's part of a full tensor, as a new contiguous tensor.

    Raises:
        ValueError: `full` does not have the parameter's full shape.
    """
    if tuple(full.shape) != spec.shape:
        raise ValueError(f"{spec.name}: expected the full shape {spec.shape}, got {tuple(full.shape)}")
    if spec.dim is None:
        return full.clone(memory_format=torch.contiguous_format)
    parts = [full.narrow(spec.dim, start, stop - start) for start, stop in spec.ranges(tp_rank, tp_size)]
    return torch.cat(parts, dim=spec.dim)


def _put(out: Tensor, local: Tensor, spec: ParamSpec, tp_rank: int, tp_size: int) -> None:
    if tuple(local.shape) != (expected := spec.local_shape(tp_rank, tp_size)):
        raise ValueError(
            f"{spec.name}: expected the part {expected} of tp rank {tp_rank} of {tp_size}, got {tuple(local.shape)}"
        )
    if spec.dim is None:
        out.copy_(local)
        return
    offset = 0
    for start, stop in spec.ranges(tp_rank, tp_size):
        out.narrow(spec.dim, start, stop - start).copy_(local.narrow(spec.dim, offset, stop - start))
        offset += stop - start


def scatter_to_full(local: Tensor, spec: ParamSpec, tp_rank: int, tp_size: int) -> Tensor:
    """A zero tensor of the full shape with this rank's part in its place.

    Summed over tp it is the full gradient where `partial_over_tp` (or where `copies` is 1).
    """
    out = local.new_zeros(spec.shape)
    _put(out, local, spec, tp_rank, tp_size)
    return out


def assemble(shards: Sequence[Tensor], spec: ParamSpec) -> Tensor:
    """The full tensor from every tp rank's part, in rank order. Of equal copies the last one counts.

    Example:
        >>> import torch
        >>> spec = ParamSpec(name="v", shape=(3,), dim=0, sections=(Section(name="vocab_size", units=3, uneven=True),))
        >>> assemble([take_local(torch.arange(3), spec, r, 2) for r in range(2)], spec)
        tensor([0, 1, 2])
    """
    out = shards[0].new_empty(spec.shape)
    for tp_rank, local in enumerate(shards):
        _put(out, local, spec, tp_rank, len(shards))
    return out
