"""What `deltamesh probe` runs on ranks, and how two results differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltamesh.cli.errors import user_errors
from deltamesh.topology import Topology

if TYPE_CHECKING:
    import numpy as np

    from deltamesh.train.micro_batches import ForwardInput


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What every topology runs: `steps` training steps of a rank-1 LoRA on random groups with a shared prompt each."""

    model: str
    steps: int
    groups: int
    prompt_tokens: int
    completions: int
    completion_tokens: int
    dtype: str
    recompute: str
    max_rows: int
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeResult:
    """What a topology gave.

    Attributes:
        seconds, losses, norms: of each step; the loss per token.
        tokens, rows: of a step; rows count shared tokens once.
        values: what every rank saw, by rank: per step and input, log-probabilities [n] and norms of hidden states [n].
    """

    seconds: list[float]
    losses: list[float]
    norms: list[float]
    tokens: int
    rows: int
    values: "list[dict[str, np.ndarray]]"


def probe_inputs(settings: ProbeSettings, vocab_size: int) -> "list[list[ForwardInput]]":
    """Groups of random sequences with a common prompt and completions of unequal length; all hidden states wanted."""
    import numpy as np

    from deltamesh.train.micro_batches import ForwardInput

    rng = np.random.default_rng(settings.seed)
    groups = []
    for _ in range(settings.groups):
        prompt = rng.integers(0, vocab_size, settings.prompt_tokens)
        group = []
        for i in range(settings.completions):
            length = max(1, settings.completion_tokens - 3 * i)
            tokens = np.concatenate([prompt, rng.integers(0, vocab_size, length)])
            targets = np.append(tokens[1:], rng.integers(0, vocab_size))
            group.append(ForwardInput(input_tokens=tokens, target_tokens=targets, hidden_states=True))
        groups.append(group)
    return groups


def probe_on_rank(settings: ProbeSettings, topologies: Sequence[Topology]) -> dict[Topology, ProbeResult]:
    """Runs the steps of each topology, one after another; all ranks of the world call it.

    Raises:
        CommandError: the model cannot be built; the same on every rank.
    """
    return {topology: _steps(settings, topology) for topology in topologies}


def _steps(settings: ProbeSettings, topology: Topology) -> ProbeResult:
    import time

    import numpy as np
    import torch
    from peft import LoraConfig

    from deltamesh.distributed.agreement import RankDisagreement
    from deltamesh.distributed.collectives import all_gather_object
    from deltamesh.train.optim import AdamParams
    from deltamesh.train.trainer_rank import TrainerRank

    with user_errors(RankDisagreement):
        rank = TrainerRank.from_pretrained(
            settings.model,
            topology=topology,
            lora=LoraConfig(r=1, target_modules="all-linear"),
            dtype=getattr(torch, settings.dtype),
            recompute=settings.recompute,
            max_rows=settings.max_rows,
            seed=settings.seed,
        )
    inputs = probe_inputs(settings, rank.model.config.vocab_size)
    tokens = sum(np.size(x.input_tokens) for group in inputs for x in group)
    seen: dict[str, np.ndarray] = {}
    seconds, losses, norms, rows = [], [], [], 0
    for step in range(settings.steps):
        start = time.perf_counter()
        total = torch.zeros((), dtype=torch.float64, device=rank.device)
        own_rows, kept = 0.0, []
        for batch in rank.forward_micro_batches(inputs):
            terms = []
            for i, out in zip(batch.indices, batch.outputs):
                assert out.target_logprobs is not None
                assert out.hidden_states is not None
                hidden = out.hidden_states.float() if settings.dtype == "bfloat16" else out.hidden_states
                terms.append(-out.target_logprobs.sum() + 0.01 * hidden.square().mean(dim=-1).sum())
                kept.append((i, out.target_logprobs.detach(), hidden.detach().norm(dim=-1)))
            loss = torch.stack(terms).sum()
            loss.backward()
            total, own_rows = total + loss.detach().double(), own_rows + batch.stats["rows"]
        sums = rank.reduce({"loss": total, "rows": own_rows})
        result = rank.optim_step(AdamParams(learning_rate=1e-3, eps=1e-5), scale_grads=1 / tokens)
        seconds.append(time.perf_counter() - start)
        for i, logprobs, sizes in kept:
            seen[f"log-probs of input {i} in step {step + 1}"] = logprobs.double().cpu().numpy()
            seen[f"hidden states of input {i} in step {step + 1}"] = sizes.double().cpu().numpy()
        losses.append(sums["loss"] / tokens)
        norms.append(result.grad_norm)
        rows = round(sums["rows"])
    return ProbeResult(
        seconds=seconds,
        losses=losses,
        norms=norms,
        tokens=tokens,
        rows=rows,
        values=all_gather_object(seen, rank.mesh.world),
    )


def largest_difference(result: ProbeResult, reference: ProbeResult) -> tuple[float, str, float]:
    """The largest relative difference of the values that any rank saw, what and where it was, and that of the norms.

    Example: `(3.1e-07, 'log-probs of input 3 in step 2 on rank 1', 2.0e-08)`
    """
    import numpy as np

    whole = {name: values for seen in reference.values for name, values in seen.items()}
    worst, where = 0.0, "nothing"
    for rank, seen in enumerate(result.values):
        for name, values in seen.items():
            scale = np.linalg.norm(whole[name])
            error = float(np.linalg.norm(values - whole[name]) / (scale if scale > 0 else 1.0))
            if not error <= worst:  # also if it is not a number
                worst, where = error, f"{name} on rank {rank}"
    pairs = zip(result.norms, reference.norms)
    return worst, where, max(abs(a - b) / abs(b) if b else abs(a) for a, b in pairs)
