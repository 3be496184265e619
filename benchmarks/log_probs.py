"""Target log-probs, forward and backward: `python benchmarks/log_probs.py` writes benchmarks/results/log_probs.json.

Against full logits. `--memory` measures the peak of one of the two in a fresh process instead, with the case's tensors
and gradients taken off.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _alternate import alternate, report
from torch import Tensor

from deltamesh.distributed.collectives import Group
from deltamesh.ops.target_logprobs import target_logprobs, target_logprobs_naive


def case(vocab: int, width: int, edges: int, wants_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows, head and targets, one edge per row."""
    torch.manual_seed(0)
    hidden = torch.randn(edges, width).requires_grad_()
    weight = torch.randn(vocab, width).mul_(width**-0.5).requires_grad_(wants_weight)
    return hidden, weight, torch.randint(0, vocab, (edges,))


def work_of(name: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], object]:
    """Forward and backward."""
    vocab = weight.shape[0]
    wanted = (hidden, weight) if weight.requires_grad else (hidden,)
    ours = {"vocab_start": 0, "vocab_size": vocab, "group": Group.single()}

    def work() -> object:
        if name == "ours":
            logprobs = target_logprobs(hidden, weight, targets, **ours)
        else:
            logprobs = target_logprobs_naive(hidden, weight, targets)
        return torch.autograd.grad(logprobs.sum(), wanted)

    return work


def peak_mib() -> float:
    """The largest resident set of this process so far (Linux; `ru_maxrss` would begin at the parent's)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def extra_memory(name: str, options: argparse.Namespace, edges: int, wants_weight: bool) -> float:
    """MiB above the inputs and their gradients, measured in a fresh process."""
    sizes = ["--vocab", str(options.vocab), "--width", str(options.width), "--edges", str(edges)]
    flags = ["--memory", name, "--threads", str(options.threads)] + (["--weight"] if wants_weight else [])
    run = subprocess.run([sys.executable, __file__, *sizes, *flags], check=True, capture_output=True, text=True)
    return float(run.stdout)


def main() -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--edges", type=int, default=4096)
    parser.add_argument("--timed-edges", type=int, default=512, help="edges of the timed case; full logits are slow")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", choices=("ours", "full"))
    parser.add_argument("--weight", action="store_true", help="with --memory: the head is trained too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        tensors = case(options.vocab, options.width, options.edges, options.weight)
        gradients = [torch.ones_like(t) for t in tensors[:2] if t.requires_grad]
        before = peak_mib()
        del gradients
        work_of(options.memory, *tensors)()
        print(peak_mib() - before)
        return
    lines = []
    for wants_weight in (False, True):
        tensors = case(options.vocab, options.width, options.timed_edges, wants_weight)
        works = {name: work_of(name, *tensors) for name in ("ours", "full")}
        seconds = alternate(works, options.repeats)
        lines.append(
            {
                "vocabulary": options.vocab,
                "width": options.width,
                "head": "trained" if wants_weight else "frozen",
                "timed edges": options.timed_edges,
                "ours s": seconds["ours"],
                "full logits s": seconds["full"],
                "time": seconds["ours"] / seconds["full"],
                "full logits extra MiB": extra_memory("full", options, options.timed_edges, wants_weight),
                "edges": options.edges,
                "ours extra MiB": extra_memory("ours", options, options.edges, wants_weight),
            }
        )
        del tensors, works
    report("log_probs", lines, repeats=options.repeats)


if __name__ == "__main__":
    main()
