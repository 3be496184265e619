"""The only module that calls torch.distributed collectives.

Every function takes a `Group`; peers are addressed by their index inside it. A group of one process takes the same
path as a larger one up to the message itself, which is then a copy. Functions of the second half are differentiable:
each names its forward and its backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from deltamesh.plan.exchange import RowExchange


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The processes along one axis of the mesh, as one of them sees it.

    Attributes:
        rank: this process's index inside the group (never its global rank).
        size: number of processes.
        handle: the process group, or None for a group of this process alone.
        control: group for small Python objects (a gloo twin where `handle` is NCCL); None means `handle`.

    Example:
        >>> Group.single().size
        1
    """

    rank: int
    size: int
    handle: dist.ProcessGroup | None
    control: dist.ProcessGroup | None = None

    @staticmethod
    def single() -> "Group":
        """The group of this process alone; needs no torch.distributed."""
        return Group(rank=0, size=1, handle=None)


# torch 2.13 renamed these two; the old names warn
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ---------------------------------------------------------------- plain collectives


def all_reduce(x: Tensor, group: Group, op: Literal["sum", "max"] = "sum") -> Tensor:
    """A new tensor: the element-wise sum (or maximum) of every rank's `x`."""
    out = x.contiguous().clone()
    if group.handle is not None:
        dist.all_reduce(out, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=group.handle)
    return out


def all_gather_rows(x: Tensor, group: Group) -> Tensor:
    """Every rank's `x` (equal shapes) one after another along dim 0, in group order."""
    if group.handle is None:
        return x.clone()
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    _all_gather(out, x.contiguous(), group=group.handle)
    return out


def reduce_scatter_rows(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks of `x` [size * n, ...]; this rank's n rows of it."""
    if group.handle is None:
        return x.clone()
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    _reduce_scatter(out, x.contiguous(), group=group.handle)
    return out


@dataclass(frozen=True, kw_only=True, eq=False)
class Pending:
    """A message on its way.

    Attributes:
        data: what is sent, not to be written before `wait`; or what arrives, not to be read before it.
        work: torch's handle.
        held: what must live until then.
    """

    data: Tensor
    work: dist.Work | None
    held: Tensor | None = None

    def wait(self) -> Tensor:
        """Returns the data once it has left or arrived."""
        if self.work is not None:
            self.work.wait()
        return self.data


def start_all_to_all_rows(x: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], group: Group) -> Pending:
    """Begins to send send_splits[p] rows of `x` to peer p; what arrives is in the order of the sending peers."""
    if group.handle is None:
        return Pending(data=x.clone(), work=None)
    x, out = x.contiguous(), x.new_empty((sum(recv_splits), *x.shape[1:]))
    splits = list(recv_splits), list(send_splits)
    work = dist.all_to_all_single(out, x, *splits, group=group.handle, async_op=True)
    return Pending(data=out, work=work, held=x)


def all_to_all_rows(x: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], group: Group) -> Tensor:
    """`start_all_to_all_rows`, waited for."""
    return start_all_to_all_rows(x, send_splits, recv_splits, group).wait()


def start_send(x: Tensor, peer: int, group: Group) -> Pending:
    """Begins to send a contiguous tensor to a peer; messages between two ranks arrive in the order they were begun.

    All ranks of a group must begin their messages in an order that agrees with one order of all messages: then no
    backend waits for ever, not even one that works off everything begun on a group one by one.
    """
    if group.handle is None:
        raise ValueError(f"a group of one process has no peer {peer}; a plan of one slice has no messages")
    return Pending(data=x, work=dist.isend(x, group=group.handle, group_dst=peer))


def start_receive(x: Tensor, peer: int, group: Group) -> Pending:
    """Begins to receive into the contiguous tensor `x`; see `start_send`."""
    if group.handle is None:
        raise ValueError(f"a group of one process has no peer {peer}; a plan of one slice has no messages")
    return Pending(data=x, work=dist.irecv(x, group=group.handle, group_src=peer))


def all_gather_object(obj: Any, group: Group) -> list[Any]:
    """Every rank's picklable `obj`, in group order. For small control data, never for tensors."""
    if group.handle is None:
        return [obj]
    out: list[Any] = [None] * group.size
    dist.all_gather_object(out, obj, group=group.control or group.handle)
    return out


# ---------------------------------------------------------------- differentiable collectives


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dx, ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


def _pad_rows(x: Tensor, multiple: int) -> Tensor:
    missing = -x.shape[0] % multiple
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing else x


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_rows: int, group: Group) -> Tensor:
        ctx.group = group
        return all_gather_rows(x, group)[:num_rows]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_rows(_pad_rows(dx, ctx.group.size), ctx.group), None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.num_rows = group, x.shape[0]
        return reduce_scatter_rows(_pad_rows(x, group.size), group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return all_gather_rows(dx, ctx.group)[: ctx.num_rows], None


def _own_rows(x: Tensor, group: Group) -> Tensor:
    return _pad_rows(x, group.size).chunk(group.size)[group.rank].clone() if x.shape[0] else x.clone()


class _CollectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_rows: int, group: Group) -> Tensor:
        ctx.group = group
        return all_gather_rows(x, group)[:num_rows]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return _own_rows(dx, ctx.group), None, None


class _CollectSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], group: Group) -> Tensor:
        ctx.rows = slice(sum(counts[: group.rank]), sum(counts[: group.rank + 1]))
        longest = max(counts)
        padded = torch.cat([x, x.new_zeros((longest - x.shape[0], *x.shape[1:]))])
        shards = all_gather_rows(padded, group).split(longest) if longest else (x,) * group.size
        return torch.cat([shard[:count] for shard, count in zip(shards, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return dx[ctx.rows].clone(), None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: "RowTransfer", group: Group) -> Tensor:
        ctx.transfer, ctx.group, ctx.num_rows = transfer, group, x.shape[0]
        sent = x.index_select(0, transfer.send_rows)
        return all_to_all_rows(sent, transfer.send_splits, transfer.recv_splits, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        transfer: RowTransfer = ctx.transfer
        back = all_to_all_rows(dy, transfer.recv_splits, transfer.send_splits, ctx.group)
        dx = dy.new_zeros((ctx.num_rows, *dy.shape[1:]))
        # one peer at a time: its rows are unique, so the sum has one order (float atomics would not)
        splits = transfer.send_splits
        for rows, part in zip(transfer.send_rows.split(splits), back.split(splits), strict=True):
            dx.index_add_(0, rows, part)
        return dx, None, None


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Forward: `x` unchanged. Backward: the sum of the gradients over the group (input of a column-parallel layer)."""
    return _CopyToGroup.apply(x, group)  # type: ignore[no-any-return]


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Forward: the sum over the group. Backward: the gradient unchanged (output of a row-parallel layer)."""
    return _ReduceFromGroup.apply(x, group)  # type: ignore[no-any-return]


def gather_rows(x: Tensor, num_rows: int, group: Group) -> Tensor:
    """Forward: equal padded row shards -> the whole `num_rows` rows. Backward: summed over the group and sharded."""
    return _GatherRows.apply(x, num_rows, group)  # type: ignore[no-any-return]


def scatter_rows(x: Tensor, group: Group) -> Tensor:
    """Forward: partial rows summed over the group, this rank's padded shard of them. Backward: gathered."""
    return _ScatterRows.apply(x, group)  # type: ignore[no-any-return]


def collect_rows(x: Tensor, num_rows: int, group: Group) -> Tensor:
    """Forward: row shards -> the whole rows. Backward: own rows of the gradient (the consumer is replicated)."""
    return _CollectRows.apply(x, num_rows, group)  # type: ignore[no-any-return]


def collect_slices(x: Tensor, counts: tuple[int, ...], group: Group) -> Tensor:
    """Like `collect_rows` for slices of unequal length: rank r brings counts[r] rows."""
    return _CollectSlices.apply(x, counts, group)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTransfer:
    """A planned `RowExchange` with its index on the device, made once per micro-batch and used by every layer."""

    send_rows: Tensor
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]

    @staticmethod
    def from_plan(exchange: RowExchange, device: torch.device) -> "RowTransfer":
        """Copies the row index of `exchange` to `device`."""
        rows = torch.from_numpy(exchange.send_rows).to(device)
        return RowTransfer(send_rows=rows, send_splits=exchange.send_splits, recv_splits=exchange.recv_splits)

    @property
    def num_received(self) -> int:
        """Rows that arrive."""
        return sum(self.recv_splits)


def exchange_rows(x: Tensor, transfer: RowTransfer, group: Group) -> Tensor:
    """Forward: rows of `x` to the peers that need them. Backward: their gradients return and are added.

    Args:
        x: [T, ...], rows of this slice.
        transfer: this rank's part of the plan.
        group: the cp group.

    Returns:
        [transfer.num_received, ...], ascending in stream order.
    """
    return _ExchangeRows.apply(x, transfer, group)  # type: ignore[no-any-return]
