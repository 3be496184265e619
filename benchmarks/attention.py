"""Tree attention, forward and backward: `python benchmarks/attention.py` writes benchmarks/results/attention.json.

A chain against torch's causal SDPA, and forests by their time per (query, key) pair, beside a chain of as many pairs.
"""

import argparse
from collections.abc import Callable
from itertools import product

import numpy as np
import torch
from _alternate import alternate, report
from torch.nn import functional as F

from deltamesh.ops.tree_attention import AttentionLayout, tree_attention_rows

HEADS, KEY_HEADS = 8, 2  # query heads share key heads in the models at hand
WIDTHS = 256, 128  # theirs is the first


def forest(lengths: list[int], parents: list[int]) -> AttentionLayout:
    """The layout of segments."""
    stops = np.cumsum(lengths)
    return AttentionLayout.build(
        segment_start=stops - lengths, segment_length=lengths, segment_parent=parents, num_received=0
    )


def pairs_of(layout: AttentionLayout) -> int:
    """(query, key) pairs that the mask holds."""
    return int((layout.tout_X - np.arange(len(layout.tout_X))).sum())


def ours(layout: AttentionLayout, width: int = WIDTHS[0]) -> Callable[[], object]:
    """Forward and backward of the op."""
    q = torch.randn(layout.num_rows, HEADS, width).requires_grad_()
    k, v = (torch.randn(layout.num_rows, KEY_HEADS, width).requires_grad_() for _ in range(2))
    do = torch.randn_like(q)

    def work() -> object:
        o = tree_attention_rows(q, k, v, scale=width**-0.5, layout=layout)
        return torch.autograd.grad(o, (q, k, v), do)

    return work


def sdpa(rows: int, sequences: int = 1, width: int = WIDTHS[0]) -> Callable[[], object]:
    """Forward and backward of causal SDPA."""
    q = torch.randn(sequences, HEADS, rows, width).requires_grad_()
    k, v = (torch.randn(sequences, KEY_HEADS, rows, width).requires_grad_() for _ in range(2))
    do = torch.randn_like(q)

    def work() -> object:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(o, (q, k, v), do)

    return work


def main() -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--longest", type=int, default=8192, help="longest chain")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    for width, length in product(WIDTHS, (2048, 4096, 8192)):
        if length > options.longest:
            continue
        layout = forest([length], [-1])
        seconds = alternate({"ours": ours(layout, width), "peer": sdpa(length, width=width)}, options.repeats)
        rows.append(row(f"chain of {length}, heads of {width}", layout, seconds, "SDPA is_causal, same rows"))

    tree = forest([1024] + [128] * 16, [-1] + [0] * 16)
    seconds = alternate({"ours": ours(tree), "peer": sdpa(1152, 16)}, options.repeats)
    rows.append(row("prompt 1024, 16 x 128", tree, seconds, "SDPA, 16 unshared sequences"))

    star = [1024] + [1] * 2048, [-1] + [0] * 2048
    spine = [1] * 1024 + [1] * 1024, [*range(-1, 1023), *range(1023, -1, -1)]
    for name, shape in (
        ("prompt 1024, 16 x 128", ([1024] + [128] * 16, [-1] + [0] * 16)),
        ("prompt 1024, 2048 x 1", star),
        ("spine of 1024, a leaf at each", spine),
    ):
        layout = forest(*shape)
        chain = forest([round((2 * pairs_of(layout)) ** 0.5)], [-1])
        seconds = alternate({"ours": ours(layout), "peer": ours(chain)}, options.repeats)
        rows.append(row(name, layout, seconds, "ours, chain of as many pairs"))
    report("attention", rows, repeats=options.repeats)


def row(case: str, layout: AttentionLayout, seconds: dict[str, float], peer: str) -> dict[str, object]:
    """One line of the table."""
    return {
        "case": case,
        "ours ms": seconds["ours"] * 1e3,
        "peer ms": seconds["peer"] * 1e3,
        "speed": seconds["peer"] / seconds["ours"],
        "ns per pair": seconds["ours"] * 1e9 / pairs_of(layout),
        "peer": peer,
    }


if __name__ == "__main__":
    main()
