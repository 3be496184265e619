"""Topologies: how many ranks each axis has, which rank sits where, and which models fit.

Pure Python: the same answer on every rank, without torch. `deltamesh.distributed.mesh` makes process groups of it.

Ranks are numbered with tp fastest, then cp, then dp: `rank = (dp_index * cp + cp_index) * tp + tp_index`. The ranks of
a tp group are therefore neighbours (they exchange most), and the ranks of a cp group are `tp` apart.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from operator import index
from typing import Literal, Protocol

Axis = Literal["dp", "cp", "tp"]

AXES: tuple[Axis, ...] = ("dp", "cp", "tp")

_VARIABLES: tuple[tuple[Axis, str], ...] = (
    ("dp", "DELTAMESH_DATA_PARALLEL_SIZE"),
    ("cp", "DELTAMESH_CONTEXT_PARALLEL_SIZE"),
    ("tp", "DELTAMESH_TENSOR_PARALLEL_SIZE"),
)
_DIVIDED_BY_TP = ("linear_num_key_heads", "linear_num_value_heads", "num_attention_heads", "intermediate_size")
_MAX_LISTED = 12


class ModelSizes(Protocol):
    """What a topology asks of a model's configuration; the names are Hugging Face's."""

    @property
    def linear_num_key_heads(self) -> int: ...
    @property
    def linear_num_value_heads(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """A rank's index on each axis."""

    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, init=False)
class Topology:
    """The number of ranks on the data, context and tensor parallel axes.

    Attributes:
        dp: data parallel ranks, each with its own micro-batches.
        cp: context parallel ranks, each with a contiguous slice of the stream.
        tp: tensor parallel ranks, each with its share of the heads and of the wide layers.
        sp: whether activations between the tp layers are sharded by rows over the tp ranks. By default on when tp > 1.
            With tp=1 it changes nothing, as the group has one rank.

    Raises:
        ValueError: a size is not a positive integer.

    Example:
        >>> topology = Topology(cp=2, tp=2)
        >>> topology.world_size, topology.sp
        (4, True)
        >>> topology.groups("cp")
        ((0, 2), (1, 3))
    """

    dp: int
    cp: int
    tp: int
    sp: bool

    def __init__(self, *, dp: int = 1, cp: int = 1, tp: int = 1, sp: bool | None = None) -> None:
        for axis, size in zip(AXES, (dp, cp, tp)):
            object.__setattr__(self, axis, _positive(size, axis))
        if not isinstance(sp, bool | None):
            raise ValueError(f"sp={sp!r} is not True, False or None; leave it out for the default, on when tp > 1")
        object.__setattr__(self, "sp", self.tp > 1 if sp is None else sp)

    def __str__(self) -> str:
        return " ".join(f"{axis}={self.size(axis)}" for axis in AXES) + (
            "" if self.sp == (self.tp > 1) else f" sp={self.sp}"
        )

    @property
    def world_size(self) -> int:
        """The number of ranks, dp * cp * tp."""
        return self.dp * self.cp * self.tp

    def size(self, axis: Axis) -> int:
        """The number of ranks on one axis."""
        return {"dp": self.dp, "cp": self.cp, "tp": self.tp}[axis]

    # ------------------------------------------------------------ where the sizes come from

    @classmethod
    def resolve(
        cls,
        world_size: int,
        *,
        dp: int | None = None,
        cp: int | None = None,
        tp: int | None = None,
        sp: bool | None = None,
    ) -> "Topology":
        """The topology of a world of `world_size` ranks: cp and tp default to 1, and dp to what is left.

        Raises:
            ValueError: a size is not a positive integer, or the sizes do not make up the world; lists what does.

        Example:
            >>> str(Topology.resolve(8, tp=2, cp=2))
            'dp=2 cp=2 tp=2'
        """
        world_size = _positive(world_size, "world_size")
        inner = cls(cp=1 if cp is None else cp, tp=1 if tp is None else tp, sp=sp)
        if dp is None and world_size % inner.world_size:
            raise ValueError(
                f"cp={inner.cp} x tp={inner.tp} = {inner.world_size} does not divide the world size {world_size}, so "
                f"no dp completes it; {_fits(world_size)}"
            )
        topology = cls(dp=world_size // inner.world_size if dp is None else dp, cp=inner.cp, tp=inner.tp, sp=sp)
        topology.check_world(world_size)
        return topology

    @classmethod
    def from_env(
        cls,
        *,
        world_size: int | None = None,
        dp: int | None = None,
        cp: int | None = None,
        tp: int | None = None,
        sp: bool | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> "Topology":
        """Sizes from DELTAMESH_{DATA,CONTEXT,TENSOR}_PARALLEL_SIZE; arguments win.

        With a world size, what neither gives is resolved as in `resolve`; without one it is 1. An empty variable counts
        as unset.

        Raises:
            ValueError: a variable that is needed is not a positive integer, or the sizes do not make up the world.

        Example:
            >>> str(Topology.from_env(tp=4, environ={"DELTAMESH_CONTEXT_PARALLEL_SIZE": "2"}))
            'dp=1 cp=2 tp=4'
        """
        environ = os.environ if environ is None else environ
        sizes = {"dp": dp, "cp": cp, "tp": tp}
        for axis, variable in _VARIABLES:
            if sizes[axis] is None and (text := environ.get(variable, "").strip()):
                sizes[axis] = _positive(int(text) if text.isdecimal() else text, variable)
        if world_size is not None:
            return cls.resolve(world_size, **sizes, sp=sp)
        return cls(**{axis: 1 if size is None else size for axis, size in sizes.items()}, sp=sp)

    # ------------------------------------------------------------ what fits

    def check_world(self, world_size: int, config: ModelSizes | None = None) -> None:
        """Raises ValueError unless there are `world_size` ranks; lists the topologies that fit (and fit the model)."""
        if self.world_size != world_size:
            raise ValueError(
                f"{self} needs {self.world_size} ranks, but the world has {world_size}; {_fits(world_size, config)}"
            )

    def check_model(self, config: ModelSizes) -> None:
        """Raises ValueError, with the tp sizes that fit, unless every tp rank gets an equal share of the model.

        Query heads, GDN key and value heads and the MLP's width are divided over tp. Key/value heads are divided, or
        replicated where tp exceeds them, so one of the two must divide the other. dp and cp fit any model.

        Example:
            >>> from types import SimpleNamespace
            >>> config = SimpleNamespace(linear_num_key_heads=16, linear_num_value_heads=32, num_attention_heads=16,
            ...                          num_key_value_heads=2, intermediate_size=9216)
            >>> Topology(tp=3).check_model(config)
            Traceback (most recent call last):
            ValueError: tp=3 does not divide linear_num_key_heads=16; use tp in {1, 2, 4, 8, 16}
        """
        if complaint := _misfit(self.tp, config):
            sizes = ", ".join(str(tp) for tp in tensor_parallel_sizes(config))
            raise ValueError(f"{complaint}; use tp in {{{sizes}}}")

    @staticmethod
    def fitting(world_size: int, config: ModelSizes | None = None) -> list["Topology"]:
        """Every topology of exactly `world_size` ranks that fits the model, smallest tp first, then smallest cp.

        Example:
            >>> [str(topology) for topology in Topology.fitting(2)]
            ['dp=2 cp=1 tp=1', 'dp=1 cp=2 tp=1', 'dp=1 cp=1 tp=2']
        """
        world_size = _positive(world_size, "world_size")
        divisors = _divisors(world_size)
        return [
            Topology(dp=world_size // (cp * tp), cp=cp, tp=tp)
            for tp, cp in product(divisors, divisors)
            if world_size % (cp * tp) == 0 and (config is None or not _misfit(tp, config))
        ]

    # ------------------------------------------------------------ who sits where

    def coordinate(self, rank: int) -> Coordinate:
        """The rank's index on each axis.

        Raises:
            ValueError: there is no such rank.

        Example:
            >>> Topology(dp=2, cp=3, tp=2).coordinate(9)
            Coordinate(dp=1, cp=1, tp=1)
        """
        if not 0 <= index(rank) < self.world_size:
            raise ValueError(f"rank {rank} is not in {self}; its ranks are 0..{self.world_size - 1}")
        return Coordinate(dp=rank // (self.cp * self.tp), cp=rank // self.tp % self.cp, tp=rank % self.tp)

    def rank(self, coordinate: Coordinate) -> int:
        """The rank at a coordinate: (dp * CP + cp) * TP + tp.

        Raises:
            ValueError: an index lies outside its axis.
        """
        for axis in AXES:
            place = getattr(coordinate, axis)
            if not 0 <= place < self.size(axis):
                raise ValueError(f"{axis} index {place} is not in {self}; use 0..{self.size(axis) - 1}")
        return (coordinate.dp * self.cp + coordinate.cp) * self.tp + coordinate.tp

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ on the named axes only, group by group; ascending inside a group and by first rank.

        Example:
            >>> Topology(dp=2, cp=2).groups("cp")
            ((0, 1), (2, 3))
            >>> Topology(cp=2, tp=2).groups("cp", "tp")
            ((0, 1, 2, 3),)
        """
        fixed = [axis for axis in AXES if axis not in axes]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinate = self.coordinate(rank)
            members.setdefault(tuple(getattr(coordinate, axis) for axis in fixed), []).append(rank)
        return tuple(tuple(ranks) for ranks in members.values())


def tensor_parallel_sizes(config: ModelSizes) -> list[int]:
    """The tp sizes that divide the model equally, ascending.

    Example: see `Topology.check_model`.
    """
    return [tp for tp in _divisors(config.linear_num_key_heads) if not _misfit(tp, config)]


def _misfit(tp: int, config: ModelSizes) -> str:
    """The first reason why tp does not fit the model, or an empty string."""
    for name in _DIVIDED_BY_TP:
        if getattr(config, name) % tp:
            return f"tp={tp} does not divide {name}={getattr(config, name)}"
    if config.num_key_value_heads % tp and tp % config.num_key_value_heads:
        return f"tp={tp} neither divides num_key_value_heads={config.num_key_value_heads} nor is a multiple of it"
    return ""


def _fits(world_size: int, config: ModelSizes | None = None) -> str:
    fitting = Topology.fitting(world_size, config)
    listed = ", ".join(f"({topology})" for topology in fitting[:_MAX_LISTED])
    more = f" and {len(fitting) - _MAX_LISTED} more" if len(fitting) > _MAX_LISTED else ""
    if world_size == 1:
        return (
            "this is one process, which runs dp=1 cp=1 tp=1; start more with `torchrun --nproc-per-node RANKS SCRIPT`"
        )
    return f"topologies of {world_size} ranks: {listed}{more}"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _positive(value: object, name: str) -> int:
    try:
        size = 0 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(f"{name}={value!r} is not a positive integer; use 1 to leave the axis out")
    return size
