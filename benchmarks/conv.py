"""The path-wise causal convolution, both ways: `python benchmarks/conv.py` writes benchmarks/results/conv.json.

Against `torch.nn.functional.conv1d` with SiLU over the same rows, which knows no tree: it is right for a chain only.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from _alternate import alternate, report
from torch.nn import functional as F

from deltamesh.ops.causal_conv1d import ConvLayout, causal_conv1d_rows

WIDTH = 4


def chain(rows: int) -> ConvLayout:
    """One sequence."""
    return ConvLayout.from_predecessors(np.arange(-1, rows - 1), num_rows=rows, num_received=0, width=WIDTH)


def star(rows: int, prompt: int, each: int) -> ConvLayout:
    """Completions of `each` rows on one prompt."""
    before = np.arange(-1, rows - 1)
    before[prompt::each] = prompt - 1
    return ConvLayout.from_predecessors(before, num_rows=rows, num_received=0, width=WIDTH)


def ours(layout: ConvLayout, channels: int, wants_weight: bool) -> Callable[[], object]:
    """Forward and backward of the op."""
    x = torch.randn(layout.num_rows, channels).requires_grad_()
    weight = torch.randn(channels, WIDTH).requires_grad_(wants_weight)
    halo, dy = x.new_zeros((0, channels)), torch.randn_like(x)
    wanted = (x, weight) if wants_weight else (x,)
    return lambda: torch.autograd.grad(causal_conv1d_rows(x, halo, weight, layout), wanted, dy)


def conv1d(rows: int, channels: int, wants_weight: bool) -> Callable[[], object]:
    """Forward and backward of torch's convolution, rows in and rows out."""
    x = torch.randn(rows, channels).requires_grad_()
    weight = torch.randn(channels, WIDTH).requires_grad_(wants_weight)
    dy = torch.randn_like(x)
    wanted = (x, weight) if wants_weight else (x,)

    def work() -> object:
        padded = F.pad(x.T, (WIDTH - 1, 0))[None]
        y = F.silu(F.conv1d(padded, weight[:, None], groups=channels))[0].T
        return torch.autograd.grad(y, wanted, dy)

    return work


def main() -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--channels", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    n, channels, lines = options.rows, options.channels, []
    for case, layout in (
        ("chain", chain(n)),
        ("prompt of a quarter, 128 rows each", star(n, n // 4, 128)),
        ("one-row pieces on one prompt", star(n, n // 4, 1)),
    ):
        for wants_weight in (False, True):
            works = {"ours": ours(layout, channels, wants_weight), "peer": conv1d(n, channels, wants_weight)}
            seconds = alternate(works, options.repeats)
            lines.append(
                {
                    "case": case,
                    "rows": n,
                    "channels": channels,
                    "weight gradient": wants_weight,
                    "ours ms": seconds["ours"] * 1e3,
                    "conv1d ms": seconds["peer"] * 1e3,
                    "speed": seconds["peer"] / seconds["ours"],
                }
            )
    report("conv", lines, repeats=options.repeats)


if __name__ == "__main__":
    main()
