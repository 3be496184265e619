"""Equivalence: everything a rank can observe of a run, and its comparison, per tensor and per rank, with one process.

`observe` runs on every rank of a topology; `compare` holds what each rank saw against what one process saw.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from peft import LoraConfig
from torch import Tensor

from deltamesh.models.sharding import ParamSpec, take_local
from deltamesh.plan.carrier import CarrierName
from deltamesh.plan.pieces import Ints
from deltamesh.plan.plan import CutRule
from deltamesh.topology import Topology
from deltamesh.train.micro_batches import IGNORE_INDEX, ForwardInput
from deltamesh.train.optim import AdamParams
from deltamesh.train.trainer_rank import TrainerRank
from deltamesh.tree import PrefixTree


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run: a model, what is trained, and on which inputs.

    Attributes:
        model: as in `TrainerRank.from_pretrained`.
        dtype: "float64", "float32" or "bfloat16".
        lora: the adapter, or None to train every parameter.
        recompute, backend, max_rows, seed, carrier: as in `TrainerRank.from_pretrained`.
        cuts: a name among `CUT_RULES`, or the cuts as fractions of the rows, ascending.
        steps: optimizer steps.
        inputs: items to run.
    """

    model: str = "tiny"
    dtype: str = "float64"
    lora: LoraConfig | None = None
    recompute: str = "none"
    backend: str = "torch"
    max_rows: int = 16384
    seed: int = 0
    cuts: str | tuple[float, ...] = "balanced"
    carrier: CarrierName = "scan"
    steps: int = 3
    inputs: Sequence[Sequence[ForwardInput]] = field(default_factory=lambda: forked_inputs())


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """A tensor of a rank and its relative error, as in `relative_error`."""

    rank: int
    tensor: str
    error: float


def forked_inputs(seed: int = 0, vocab_size: int = 259) -> list[list[ForwardInput]]:
    """Groups that share prefixes of many shapes; hidden states wanted of some.

    A prompt with completions of unequal length, one of them a prefix of another and one a duplicate; a nested tree
    whose shared runs are shorter than the convolution; a lone long sequence; a group that parts at its first token.
    """
    rng = np.random.default_rng(seed)

    def draw(length: int) -> list[int]:
        return [int(token) for token in rng.integers(0, vocab_size, length)]

    def item(tokens: list[int], *, hidden: bool, ignore_prefix: int = 0) -> ForwardInput:
        targets = [*tokens[1:], int(rng.integers(0, vocab_size))]
        targets[:ignore_prefix] = [IGNORE_INDEX] * ignore_prefix
        return ForwardInput(input_tokens=tokens, target_tokens=targets, hidden_states=hidden)

    prompt = draw(37)
    answers = [prompt + draw(n) for n in (1, 5, 70, 19)]
    answers += [answers[2][:60], answers[1]]
    first = [item(tokens, hidden=i % 2 == 0, ignore_prefix=36 if i == 3 else 0) for i, tokens in enumerate(answers)]
    node, tree = draw(2), []
    for n in (1, 2, 1):
        node = node + draw(n)
        tree += [item(node + draw(m), hidden=m == 3) for m in (2, 3)]
    lone = [item(draw(83), hidden=True)]
    apart = [item(draw(n), hidden=False) for n in (1, 6)]
    return [first, tree, lone, apart]


# ---------------------------------------------------------------- where the cuts fall


def _cuts_near(offset: int) -> CutRule:
    def rule(tree: PrefixTree, num_slices: int) -> Ints:
        forks = np.clip(tree.node_start[1:] + offset, 0, tree.num_rows)
        picked = forks[np.linspace(0, len(forks) - 1, num_slices + 1).astype(int)[1:-1]]
        return np.concatenate([[0], np.sort(picked), [tree.num_rows]]).astype(np.int64)

    return rule


def _one_row_and_empty(tree: PrefixTree, num_slices: int) -> Ints:
    middle = tree.num_rows // 2
    inner = [middle, middle + 1, middle + 1, middle + 3, middle + 3, tree.num_rows, tree.num_rows][: num_slices - 1]
    return np.array([0, *inner, tree.num_rows], dtype=np.int64)


def _cuts_at(fractions: tuple[float, ...], tree: PrefixTree, num_slices: int) -> Ints:
    assert len(fractions) == num_slices - 1, (fractions, num_slices)
    return np.array([0, *(round(f * tree.num_rows) for f in fractions), tree.num_rows], dtype=np.int64)


CUT_RULES: Mapping[str, CutRule | None] = {
    "balanced": None,
    "before-forks": _cuts_near(-1),
    "at-forks": _cuts_near(0),
    "after-forks": _cuts_near(1),
    "one-row-and-empty": _one_row_and_empty,
}


# ---------------------------------------------------------------- observing and comparing


# With the usual eps, a gradient element that is zero up to rounding moves its parameter by a whole step either way; and
# larger steps change the tiny model so much that fp32 rounding of the first step grows in the later ones.
SMOOTH_ADAM = AdamParams(learning_rate=2e-3, eps=1e-2)


def both_factors_lora() -> LoraConfig:
    """A LoRA on all linear layers whose B is not zero, so that neither factor's gradient is; small, so that the random
    model stays well conditioned: fp32 errors are those of fp64 times the ratio of the precisions, 5e8.
    """
    return LoraConfig(r=4, lora_alpha=2, target_modules="all-linear", init_lora_weights=False)


def observe(scenario: Scenario, topology: Topology) -> dict[str, Tensor]:
    """Runs a scenario on this rank and returns all it can see, as CPU tensors.

    Keys: `logprobs/i` and `hidden/i` of input i (of this dp rank), `gradient/NAME` and `parameter/NAME` (this rank's
    parts; gradients of the first step, parameters after the last), `norm` (of the first step).
    """
    torch.use_deterministic_algorithms(True)
    rank = TrainerRank.from_pretrained(
        scenario.model,
        topology=topology,
        lora=scenario.lora,
        dtype=getattr(torch, scenario.dtype),
        recompute=scenario.recompute,
        backend=scenario.backend,
        max_rows=scenario.max_rows,
        seed=scenario.seed,
        carrier=scenario.carrier,
        cuts=CUT_RULES[scenario.cuts] if isinstance(scenario.cuts, str) else partial(_cuts_at, scenario.cuts),
    )
    seen: dict[str, Tensor] = {}
    for step in range(scenario.steps):
        for batch in rank.forward_micro_batches(scenario.inputs):
            for i, out in zip(batch.indices, batch.outputs, strict=True):
                if step == 0:
                    seen |= _outputs(i, out.target_logprobs, out.hidden_states)
            loss_of(batch.indices, [(o.target_logprobs, o.hidden_states) for o in batch.outputs]).backward()
        if step == 0:
            gradients = rank.reduced_gradients()
            seen |= {f"gradient/{name}": g for name, g in gradients.items()}
            seen["norm"] = torch.tensor([rank.global_norm(gradients)], dtype=torch.float64)
        rank.optim_step(SMOOTH_ADAM, scale_grads=1 / 64)
    seen |= {f"parameter/{name}": p for name, p in rank.trainable_parameters().items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in seen.items()}


def _outputs(index: int, logprobs: Tensor | None, hidden: Tensor | None) -> dict[str, Tensor]:
    named = {f"logprobs/{index}": logprobs, f"hidden/{index}": hidden}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def loss_of(indices: Sequence[int], outputs: Sequence[tuple[Tensor | None, Tensor | None]]) -> Tensor:
    """A loss that weighs every output element differently, so that a misplaced gradient is seen.

    The weights have one sign: sums that cancel would have large relative errors in fp32 on any topology.
    """
    terms = []
    for i, pair in zip(indices, outputs, strict=True):
        for kind, x in enumerate(pair):
            if x is not None:
                places = torch.arange(x.numel(), dtype=torch.float64).view(x.shape)  # fp32 would round the angles
                weights = (1.0 + 0.5 * torch.cos(0.7 * places + i + kind)) * (1.0 if kind == 0 else 0.05)
                terms.append((x * weights.to(x)).sum())
    return torch.stack(terms).sum()


def compare(
    ranks: Sequence[Mapping[str, Tensor]],
    alone: Mapping[str, Tensor],
    topology: Topology,
    specs: Mapping[str, ParamSpec],
) -> Iterator[Deviation]:
    """Yields the error of every tensor of every rank against the run of one process.

    Args:
        ranks: what each rank of the topology observed.
        alone: what one process observed.
        topology: of the ranks.
        specs: of all trained parameters.

    Raises:
        AssertionError: a rank saw other tensors than it should, or an input was run by no dp rank or by several.
    """
    for rank, seen in enumerate(ranks):
        _check_names(rank, seen, alone)
        for name, tensor in seen.items():
            expected, scale = alone[name], 0.0
            kind, _, parameter = name.partition("/")
            if kind in ("gradient", "parameter"):
                # a part of few elements can be near zero by cancellation: it is held against an average part at least
                spec, whole = specs[parameter], expected
                expected = take_local(whole, spec, topology.coordinate(rank).tp, topology.tp)
                scale = whole.double().norm().item() * (expected.numel() / whole.numel()) ** 0.5
            yield Deviation(rank=rank, tensor=name, error=relative_error(tensor, expected, scale))
    outputs = {name for name in alone if name.startswith(("logprobs/", "hidden/"))}
    for name in outputs:
        holders = [rank for rank, seen in enumerate(ranks) if name in seen]
        assert len(holders) == topology.cp * topology.tp, f"{name} is on ranks {holders} of {topology}"


def _check_names(rank: int, seen: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> None:
    unknown = seen.keys() - alone.keys()
    missing = {name for name in alone.keys() - seen.keys() if not name.startswith(("logprobs/", "hidden/"))}
    assert not unknown and not missing, f"rank {rank}: unexpected {sorted(unknown)}, missing {sorted(missing)}"


def relative_error(x: Tensor, y: Tensor, least_scale: float = 0.0) -> float:
    """||x - y|| / max(||y||, least_scale); 0 if x equals y, infinite if shapes differ or x is not finite.

    Example:
        >>> relative_error(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0]))
        0.0
    """
    if x.shape != y.shape or not bool(torch.isfinite(x).all()):
        return float("inf")
    difference, scale = (x.double() - y.double()).norm().item(), max(y.double().norm().item(), least_scale)
    return 0.0 if difference == 0 else difference / scale if scale > 0 else float("inf")
