"""Gates of all chunks at once: they are small, and thousands of operations on them would not be.

Letters: T rows, H value heads, N chunks of a batch, M chunks of a length, C rows of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule.schedule import ChunkBatch, ExitGroup

# A smaller |beta| is replaced: the gradient of beta divides by its square. Writes of 1e-12 of a value are far below
# fp32's, 1e-20 below fp64's resolution.
_LEAST_G = -1e4
_LEAST_BETA = {torch.float32: 1e-12, torch.float64: 1e-20}


@dataclass(frozen=True, kw_only=True, eq=False)
class Gates:
    """Gates of a batch of chunks; all but `seen` are [N, H, C].

    Attributes:
        G: sum of g over the rows that each row sees (its ancestors in the chunk, and itself).
        rest: what G lost when it was rounded. Rows with strong decay make G large; without the rest, differences
            between later rows would have its absolute error, which is a relative error of their decay.
        gamma: exp(G), zero at padding.
        beta: write strength.
        dG, dbeta: their gradients, filled by the backward (absent in the forward).
        seen: [1 or N, C, C], 1 where row i sees row j, else 0.
    """

    G: Tensor
    rest: Tensor
    gamma: Tensor
    beta: Tensor
    dG: Tensor
    dbeta: Tensor
    seen: Tensor

    def part(self, chunks: slice) -> "Gates":
        """Of some of the chunks; gradients are written through to the whole."""
        if chunks.stop - chunks.start == len(self.G):
            return self
        return Gates(
            G=self.G[chunks],
            rest=self.rest[chunks],
            gamma=self.gamma[chunks],
            beta=self.beta[chunks],
            dG=self.dG[chunks],
            dbeta=self.dbeta[chunks],
            seen=self.seen if len(self.seen) == 1 else self.seen[chunks],
        )

    def decays(self, out: Tensor) -> Tensor:
        """D [N, H, C, C] = exp(G_i - G_j), zero where i does not see j.

        Unseen exponents may be large and positive, so they are cleared before `exp`, not only after it. (With -inf
        for them `exp` takes twice as long.)
        """
        seen = self.seen[:, None]
        torch.sub(self.G[..., :, None], self.G[..., None, :], out=out)
        out.add_(self.rest[..., :, None]).sub_(self.rest[..., None, :])
        return out.mul_(seen).exp_().mul_(seen)

    def decay_to(self, group: ExitGroup) -> Tensor:
        """The rows of D that belong to an exit, [N H, C, 1]."""
        seen = group.row(self.seen[:, None])
        to_exit = group.row(self.G[..., None]) - self.G
        # in the order of `decays`: a state computed again in the backward has the bits that it had in the forward
        to_exit.add_(group.row(self.rest[..., None])).sub_(self.rest).mul_(seen).exp_().mul_(seen)
        return to_exit.view(-1, self.G.shape[-1], 1)


class GateTable:
    """Gates of all batches.

    Args:
        batches: of the slice.
        g, beta: [T, H].
        dtype: of the computation.
        backward: make room for gradients.
    """

    def __init__(
        self, batches: Sequence[ChunkBatch], g: Tensor, beta: Tensor, dtype: torch.dtype, *, backward: bool
    ) -> None:
        self._of: dict[int, Gates] = {}
        self._lengths: list[tuple[Gates, Tensor, Tensor | None, Tensor | None]] = []  # no ancestors: chains
        by_length: dict[int, list[int]] = {}
        for number, batch in enumerate(batches):
            by_length.setdefault(batch.length, []).append(number)
        for length, numbers in by_length.items():
            self._add(length, [(n, batches[n]) for n in numbers], g, beta, dtype, backward)

    def __getitem__(self, number: int) -> Gates:
        return self._of[number]

    def store_gradients(self, dg_TH: Tensor, dbeta_TH: Tensor) -> None:
        """Writes the rows of dg and dbeta."""
        for gates, rows, valid, ancestors in self._lengths:
            # g of row j reaches the G of every row that sees j.
            if ancestors is None:
                dg = gates.dG.flip(-1).cumsum(-1).flip(-1)
            else:
                dg = gates.dG @ ancestors.to(gates.dG.dtype)
            for out, gradient in ((dg_TH, dg), (dbeta_TH, gates.dbeta)):
                values = gradient.transpose(1, 2).flatten(0, 1).to(out.dtype)
                out.index_copy_(0, rows, values if valid is None else values[valid])

    def _add(
        self,
        length: int,
        members: list[tuple[int, ChunkBatch]],
        g: Tensor,
        beta: Tensor,
        dtype: torch.dtype,
        backward: bool,
    ) -> None:
        rows = torch.cat([b.rows for _, b in members])
        shared = all(b.ancestors is members[0][1].ancestors for _, b in members) and len(members[0][1].ancestors) == 1
        if shared:
            ancestors = members[0][1].ancestors
        else:
            ancestors = torch.cat([b.ancestors.expand(b.count, -1, -1) for _, b in members])
        g_MHC, beta_MHC = (
            x.index_select(0, rows).to(dtype).view(-1, length, x.shape[1]).transpose(1, 2) for x in (g, beta)
        )
        # Sums along a chain run row by row, whatever the number of heads; a product of few rows may be summed in
        # another order than one of many.
        chains = all(b.chains for _, b in members)
        g_MHC = g_MHC.clamp_min(_LEAST_G)  # exp of it is zero already, and -inf would make 0 x -inf of what is not seen
        exact = g_MHC.double()
        exact = exact.cumsum(-1) if chains else (exact @ ancestors.double().mT).contiguous()
        G = exact.to(dtype)
        gamma = G.exp()
        valid = None
        if any(b.valid is not None for _, b in members):
            real = ancestors.diagonal(dim1=-2, dim2=-1)
            gamma = gamma * real[:, None]
            valid = _places([b for _, b in members], rows.device)
        least = _LEAST_BETA[dtype]
        none = G.new_empty(0)
        gates = Gates(
            G=G,
            rest=(exact - G).to(dtype),
            gamma=gamma,
            beta=torch.where(beta_MHC.abs() < least, least, beta_MHC).contiguous(),
            dG=torch.zeros_like(G) if backward else none,
            dbeta=torch.zeros_like(G) if backward else none,
            seen=ancestors.to(dtype),
        )
        self._lengths.append((gates, rows if valid is None else rows[valid], valid, None if chains else ancestors))
        start = 0
        for number, b in members:
            part = slice(start, start + b.count)
            start += b.count
            self._of[number] = gates.part(part)


def _places(batches: Sequence[ChunkBatch], device: torch.device) -> Tensor:
    """int64: the places that are not padding, in the rows of the batches one after another; asks the device nothing."""
    places, start = [], 0
    for b in batches:
        size = b.count * b.length
        places.append(torch.arange(start, start + size, device=device) if b.valid is None else b.valid + start)
        start += size
    return torch.cat(places)
