"""Target log-probabilities, tile by tile: no logits outside one tile of rows x vocabulary.

With p = softmax(W h), d logprob_e / d h = w_target(e) - sum_v p_v w_v. The second term, the mean output row, needs
neither the target nor the incoming gradient, so the forward makes it beside the normaliser (Milakov and Gimelshein's
online softmax, arXiv:1805.02867, with w_v in the place of attention's values): the gradient of hidden rows costs
no second product with the head. Only the gradient of the head itself, where wanted, forms the logits again.

Letters: T hidden rows, U rows with an edge, E edges, V local vocabulary, D model width, u rows and v vocabulary of a
tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltamesh.distributed import collectives
from deltamesh.distributed.collectives import Group

_VOCAB_BLOCK = 1024  # with 256 rows: a tile of 1 MiB in fp32, about a second-level cache
_EDGE_BLOCK = 1024  # edges whose head rows are gathered at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """This rank of the op: what forward and backward both need."""

    vocab_start: int
    chunk_rows: int
    group: Group
    keep_mean: bool  # whether a gradient of the hidden rows may be asked for


class TargetLogprobs(torch.autograd.Function):
    """logprobs_E of (hidden_TD, weight_VD, rows_E, targets_E); see `target_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, rows_E: Tensor, targets_E: Tensor, shape: Shard
    ) -> Tensor:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        rows_U, unique_E = torch.unique(rows_E, return_inverse=True)
        edges = _LocalEdges(targets_E, shape.vocab_start, weight_VD.shape[0])
        max_U = torch.full((rows_U.shape[0], 1), -torch.inf, dtype=dtype, device=hidden_TD.device)
        sum_U = torch.zeros_like(max_U)
        mean_UD = max_U.new_zeros((rows_U.shape[0] if shape.keep_mean else 0, hidden_TD.shape[1]))
        target_E = max_U.new_full((targets_E.shape[0],), -torch.inf)

        scratch = max_U.new_empty(shape.chunk_rows * _VOCAB_BLOCK)  # fresh memory for every tile would cost page faults
        for vocab in _blocks(weight_VD.shape[0], _VOCAB_BLOCK):
            weight_vD = weight_VD[vocab].to(dtype)
            for some in _blocks(rows_U.shape[0], shape.chunk_rows):
                logits_uv = _product(hidden_TD.index_select(0, rows_U[some]).to(dtype), weight_vD.T, scratch)
                new_max = torch.maximum(max_U[some], logits_uv.amax(1, keepdim=True))
                shrink = (max_U[some] - new_max).exp_()
                logits_uv.sub_(new_max).exp_()
                sum_U[some] = sum_U[some] * shrink + logits_uv.sum(1, keepdim=True)
                max_U[some] = new_max
                if shape.keep_mean:
                    mean_UD[some].mul_(shrink).addmm_(logits_uv, weight_vD)
            for e in edges.of(vocab):
                hidden_eD = hidden_TD.index_select(0, rows_E[e]).to(dtype)
                target_E[e] = (hidden_eD * weight_vD[edges.local_E[e] - vocab.start]).sum(1)

        lse_U, logprob_target_E = _reduce((max_U + sum_U.log())[:, 0], target_E, shape.group)
        if shape.keep_mean:  # local sums divided by the normaliser of the whole vocabulary
            mean_UD.mul_((max_U - lse_U[:, None]).exp_())
        ctx.save_for_backward(hidden_TD, weight_VD, rows_E, rows_U, unique_E, lse_U, mean_UD)
        ctx.edges, ctx.shape = edges, shape
        return logprob_target_E - lse_U.index_select(0, unique_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprobs_E: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TD, weight_VD, rows_E, rows_U, unique_E, lse_U, mean_UD = ctx.saved_tensors
        edges: _LocalEdges = ctx.edges
        grad_U = torch.zeros_like(lse_U)
        _add_rows(grad_U, unique_E, dlogprobs_E)
        dhidden = dweight = None
        if ctx.needs_input_grad[0]:
            dhidden_TD = lse_U.new_zeros(hidden_TD.shape)
            dhidden_TD.index_copy_(0, rows_U, mean_UD * -grad_U[:, None])
            if weight_VD.shape[0]:
                for some in _blocks(rows_E.shape[0], _EDGE_BLOCK):
                    grad_e = torch.where(edges.is_local_E[some], dlogprobs_E[some], 0.0)
                    weight_eD = weight_VD.index_select(0, edges.local_E[some]).to(lse_U.dtype)
                    _add_rows(dhidden_TD, rows_E[some], weight_eD * grad_e[:, None])
            dhidden = dhidden_TD.to(hidden_TD.dtype)
        if ctx.needs_input_grad[1]:
            dweight = torch.empty_like(weight_VD, memory_format=torch.contiguous_format)
            scratch = lse_U.new_empty(ctx.shape.chunk_rows * _VOCAB_BLOCK)
            for vocab in _blocks(weight_VD.shape[0], _VOCAB_BLOCK):
                weight_vD = weight_VD[vocab].to(lse_U.dtype)
                in_place = dweight.dtype == lse_U.dtype  # otherwise sums are rounded once, at the end
                dweight_vD = dweight[vocab].zero_() if in_place else torch.zeros_like(weight_vD)
                for some in _blocks(rows_U.shape[0], ctx.shape.chunk_rows):
                    hidden_uD = hidden_TD.index_select(0, rows_U[some]).to(lse_U.dtype)
                    p_uv = _product(hidden_uD, weight_vD.T, scratch).sub_(lse_U[some, None]).exp_()
                    dweight_vD.addmm_(p_uv.T, hidden_uD * -grad_U[some, None])
                for e in edges.of(vocab):
                    hidden_eD = hidden_TD.index_select(0, rows_E[e]).to(lse_U.dtype)
                    _add_rows(dweight_vD, edges.local_E[e] - vocab.start, hidden_eD * dlogprobs_E[e, None])
                if not in_place:
                    dweight[vocab] = dweight_vD
        return dhidden, dweight, None, None, None


class _LocalEdges:
    """The edges whose targets this rank's part of the vocabulary holds, by block of vocabulary."""

    def __init__(self, targets_E: Tensor, vocab_start: int, vocab_local: int) -> None:
        shifted_E = targets_E - vocab_start
        self.is_local_E = (shifted_E >= 0) & (shifted_E < vocab_local)
        self.local_E = torch.where(self.is_local_E, shifted_E, 0)  # 0 where it is not local
        # edges that are not local stand before or after all blocks
        sorted_E, self.order_E = torch.sort(shifted_E, stable=True)
        starts = torch.arange(0, vocab_local + _VOCAB_BLOCK, _VOCAB_BLOCK, device=targets_E.device)
        # the only question asked of the device
        self.bounds = torch.searchsorted(sorted_E, starts.clamp_max(vocab_local)).tolist()

    def of(self, vocab: slice) -> Iterator[Tensor]:
        """Blocks of indices of the edges with a target in one block of the vocabulary, in target order."""
        block = vocab.start // _VOCAB_BLOCK
        first, last = self.bounds[block], self.bounds[block + 1]
        for some in _blocks(last - first, _EDGE_BLOCK):
            yield self.order_E[first + some.start : first + some.stop]


def _reduce(local_lse_U: Tensor, local_target_E: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Normalisers and target logits of the whole vocabulary, in two small messages: a maximum and a sum."""
    rows = local_lse_U.shape[0]
    largest = collectives.all_reduce(torch.cat([local_lse_U, local_target_E]), group, op="max")
    max_U, target_E = largest[:rows], largest[rows:]
    total_U = collectives.all_reduce((local_lse_U - max_U).exp_(), group, op="sum")
    return max_U + total_U.log(), target_E


def _product(left_uD: Tensor, right_Dv: Tensor, scratch: Tensor) -> Tensor:
    """[u, v] in the scratch buffer, until the next product there."""
    shape = (left_uD.shape[0], right_Dv.shape[1])
    return torch.mm(left_uD, right_Dv, out=scratch[: shape[0] * shape[1]].view(shape))


def _blocks(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _add_rows(into: Tensor, index: Tensor, rows: Tensor) -> None:
    """Adds rows in one fixed order: serially on the CPU, by sorted indices (no float atomics) elsewhere."""
    if into.device.type == "cpu":
        into.index_add_(0, index, rows)
    else:
        into.index_put_((index,), rows, accumulate=True)
