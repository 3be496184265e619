"""A training step against transformers + PEFT: `python benchmarks/training_step.py` writes results/training_step.json.

Forward, loss, backward and AdamW of a LoRA of rank 8 on every linear layer of the 6-layer model, on 16 completions (128
tokens each) of a 1,024-token prompt, in fp32. Theirs: `Qwen3_5ForCausalLM` with its PyTorch functions and SDPA
(`--attention eager` for the other), PEFT and torch's AdamW, on the same data (i) in right-padded batches and (ii) one
sequence at a time, with gradient accumulation.

Before anything is timed, loss and every LoRA gradient are held against each other. Peak memory is the growth of the
largest resident size over the loaded model, optimizer state and gradients included, of a fresh process per case.

Timed by default: ours, ours with full recomputation, and the faster of theirs. `--timed` alone times nothing, so that
`--timed --measured ours "one at a time"` compares memory within minutes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from _alternate import alternate, report
from _data import Sequences, forward_inputs, group, targets_of
from _model import six_layers, trainer, weights, write_model
from peft import PeftModel
from torch import Tensor

from deltamesh.testing.oracle import hugging_face_model, reference_functions
from deltamesh.train.optim import AdamParams
from deltamesh.train.trainer_rank import TrainerRank

TOLERANCE = 2e-5
ADAM = AdamParams(learning_rate=1e-4)
OURS = {"ours": "none", "ours, selective recompute": "selective", "ours, full recompute": "full"}
THEIRS = {"padded batch of 16": 16, "padded batches of 4": 4, "one at a time": 1}
CASES = (*OURS, *THEIRS)
TIMED = ("ours", "ours, full recompute", "one at a time")


def ours_gradients(rank: TrainerRank, data: Sequences) -> Tensor:
    """The summed loss; gradients are left in the parameters."""
    total = torch.zeros(())
    for batch in rank.forward_micro_batches([forward_inputs(data)]):
        losses = [-out.target_logprobs.sum() for out in batch.outputs if out.target_logprobs is not None]
        loss = torch.stack(losses).sum()
        loss.backward()
        total = total + loss.detach()
    return total


def their_gradients(model: torch.nn.Module, data: Sequences, *, size: int) -> Tensor:
    """The summed loss; gradients are left in the parameters."""
    longest = max(len(tokens) for tokens, _ in data)
    batch = torch.zeros(len(data), longest, dtype=torch.long)
    labels, mask = torch.full_like(batch, -100), torch.zeros_like(batch)
    for i, (tokens, first) in enumerate(data):
        batch[i, : len(tokens)] = torch.from_numpy(tokens)
        labels[i, : len(tokens)] = torch.from_numpy(targets_of(tokens, first))
        mask[i, : len(tokens)] = 1
    total = torch.zeros(())
    with reference_functions():
        for part in [slice(i, i + size) for i in range(0, len(data), size)]:
            # `shift_labels`: targets that are shifted already; `num_items_in_batch=1` gives the sum of the losses
            loss = model(
                input_ids=batch[part],
                attention_mask=mask[part] if size > 1 else None,
                labels=labels[part],
                shift_labels=labels[part],
                num_items_in_batch=1,
                use_cache=False,
            ).loss
            loss.backward()
            total = total + loss.detach()
    return total


def ours_step(rank: TrainerRank, data: Sequences) -> None:
    """One step."""
    ours_gradients(rank, data)
    rank.optim_step(ADAM, scale_grads=1 / trained_tokens(data))


def their_step(model: torch.nn.Module, adamw: torch.optim.Optimizer, data: Sequences, *, size: int) -> None:
    """One step."""
    their_gradients(model, data, size=size)
    for p in trained(model).values():
        assert p.grad is not None
        p.grad /= trained_tokens(data)
    adamw.step()
    adamw.zero_grad()


def trained_tokens(data: Sequences) -> int:
    """Tokens with a loss."""
    return sum(len(tokens) - first for tokens, first in data)


def trained(model: torch.nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by our names."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name.removeprefix("base_model.model.").replace(".default.", "."): p for name, p in named.items()}


def peer(attention: str, adapter: Path) -> PeftModel:
    """Their model with the same weights and adapter."""
    model = hugging_face_model(six_layers(), weights(), torch.float32)
    model.set_attn_implementation(attention)
    return PeftModel.from_pretrained(model, str(adapter), is_trainable=True)


def adamw_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Torch's, with our settings."""
    return torch.optim.AdamW(
        trained(model).values(),
        lr=ADAM.learning_rate,
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )


def check_same_work(rank: TrainerRank, model: torch.nn.Module, data: Sequences) -> dict[str, float]:
    """The worst relative errors of loss and LoRA gradients.

    Raises:
        AssertionError: one is above the tolerance.
    """
    worst: dict[str, float] = {}
    mine = ours_gradients(rank, data)
    gradients = {name: p.grad for name, p in rank.trainable_parameters().items()}
    for case in ("padded batches of 4", "one at a time"):
        theirs = their_gradients(model, data, size=THEIRS[case])
        others = trained(model)
        assert others.keys() == gradients.keys(), others.keys() ^ gradients.keys()
        errors = {"loss": abs(mine.item() / theirs.item() - 1)}
        for name, gradient in gradients.items():
            other = others[name].grad
            assert gradient is not None and other is not None, name
            errors[name] = ((gradient - other).norm() / other.norm()).item()
        name = max(errors, key=errors.__getitem__)
        assert errors[name] <= TOLERANCE, f"{case}: {name} differs by {errors[name]:.1e}"
        worst[case] = errors[name]
        model.zero_grad()
    for p in rank.trainable_parameters().values():
        p.grad = None
    return worst


def work_of(case: str, directory: Path, attention: str, data: Sequences) -> Callable[[], None]:
    """One step of a case."""
    if case in OURS:
        rank = trainer(directory / "six-layers", max_rows=16384, recompute=OURS[case])
        return lambda: ours_step(rank, data)
    model = peer(attention, directory / "adapter")
    adamw = adamw_of(model)
    return lambda: their_step(model, adamw, data, size=THEIRS[case])


def peak_mib() -> float:
    """The largest resident set of this process so far (Linux; `ru_maxrss` would begin at the parent's)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def resident_mib() -> float:
    """The resident set of this process now."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


def growth_mib(case: str, directory: Path, options: argparse.Namespace) -> float:
    """Peak resident growth of one step of a case in a fresh process."""
    sizes = [
        "--prompt",
        str(options.prompt),
        "--completions",
        str(options.completions),
        "--length",
        str(options.length),
    ]
    flags = ["--memory", case, "--directory", str(directory), "--threads", str(options.threads)]
    command = [sys.executable, __file__, *sizes, *flags, "--attention", options.attention]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    """Agreement, time, memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="sdpa")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timed", nargs="*", choices=CASES, default=list(TIMED))
    parser.add_argument("--measured", nargs="*", choices=CASES, default=list(CASES), help="whose memory is measured")
    parser.add_argument("--memory", choices=CASES, help="print the peak growth of one case instead")
    parser.add_argument("--directory", type=Path, help="with --memory: where model and adapter are")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = {"prompt": options.prompt, "completions": options.completions, "length": options.length}
    data = group(np.random.default_rng(0), six_layers().vocab_size, **shape)
    if options.memory:
        work = work_of(options.memory, options.directory, options.attention, data)
        before = resident_mib()
        work()
        print(peak_mib() - before)
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rank = trainer(write_model(directory), max_rows=16384)
        rank.export_lora(directory / "adapter")
        errors = check_same_work(rank, peer(options.attention, directory / "adapter"), data)
        del rank
        print("largest errors:", errors, flush=True)
        growth = {case: growth_mib(case, directory, options) for case in options.measured}
        print("peak growth, MiB:", growth, flush=True)
        works = {case: work_of(case, directory, options.attention, data) for case in options.timed}
        seconds = alternate(works, options.repeats) if works else {}
    fastest = min((case for case in THEIRS if case in seconds), key=seconds.__getitem__, default=None)
    lines = [
        {
            "case": case,
            "worst error": errors.get(case, ""),
            "s": seconds.get(case, ""),
            "speed-up": seconds[fastest] / seconds[case] if case in seconds and fastest else "",
            "peak growth MiB": growth.get(case, ""),
            **{f"memory / {t}": growth[case] / growth[t] for t in THEIRS if t in growth and case in growth},
        }
        for case in CASES
        if case in seconds or case in growth
    ]
    report("training_step", lines, repeats=options.repeats)


if __name__ == "__main__":
    main()
