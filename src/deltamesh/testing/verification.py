"""Verification: the topology matrix against one process, and one process against Hugging Face, with tolerances.

`deltamesh verify` prints what this module finds; tests assert on it.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Final

import peft
import torch
from torch import Tensor, nn

from deltamesh.models import HybridCausalLM, ParamSpec, load_config, load_directory, random_weights
from deltamesh.models.lora import add_lora
from deltamesh.testing.equivalence import SMOOTH_ADAM, Deviation, Scenario, compare, loss_of, observe
from deltamesh.testing.oracle import hugging_face_model, hugging_face_outputs
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Topology
from deltamesh.train.micro_batches import ForwardInput

KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "logprobs": "log-probs",
        "hidden": "hidden states",
        "gradient": "gradients",
        "norm": "gradient norm",
        "parameter": "parameters",
    }
)
"""First part of an observation's name -> what it is called in tables."""

TOLERANCES: Final[Mapping[str, float]] = MappingProxyType({"float64": 1e-9, "float32": 2e-5})
"""Largest relative error of any tensor on any rank, by dtype."""

SIZES: Final = (
    (1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 8, 1), (1, 1, 2), (1, 1, 4),
    (1, 2, 2), (1, 2, 4), (1, 4, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2),
)  # fmt: skip


def matrix(sizes: Iterable[tuple[int, int, int]] = SIZES) -> list[Topology]:
    """Topologies of these (dp, cp, tp), with and without sequence parallelism where tp > 1.

    Example:
        >>> [str(topology) for topology in matrix([(1, 2, 2)])]
        ['dp=1 cp=2 tp=2', 'dp=1 cp=2 tp=2 sp=False']
    """
    return [
        Topology(dp=dp, cp=cp, tp=tp, sp=sp) for dp, cp, tp in sizes for sp in ((True, False) if tp > 1 else (False,))
    ]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How far one run is from its reference.

    Attributes:
        run: what ran.
        reference: what it was compared with.
        tolerance: the largest error that is good.
        worst: the largest deviation of each kind of tensor.
    """

    run: str
    reference: str
    tolerance: float
    worst: Mapping[str, Deviation]

    @property
    def good(self) -> bool:
        """Whether every tensor of every rank is within tolerance."""
        return all(deviation.error <= self.tolerance for deviation in self.worst.values())

    @property
    def largest(self) -> Deviation:
        """The worst of all."""
        return max(self.worst.values(), key=lambda deviation: deviation.error)


def worst_by_kind(deviations: Iterable[Deviation]) -> dict[str, Deviation]:
    """The largest deviation of each kind of tensor, kinds in the order of `KINDS`."""
    worst: dict[str, Deviation] = {}
    for deviation in deviations:
        kind = deviation.tensor.partition("/")[0]
        if kind not in worst or deviation.error > worst[kind].error:
            worst[kind] = deviation
    return {kind: worst[kind] for kind in KINDS if kind in worst}


def unshared(scenario: Scenario) -> Scenario:
    """The scenario with every sequence in a micro-batch of its own, so that no row is shared.

    Example:
        >>> len(unshared(Scenario()).inputs) == sum(len(group) for group in Scenario().inputs)
        True
    """
    return replace(scenario, inputs=[[item] for item in chain.from_iterable(scenario.inputs)], max_rows=1)


def verify(
    pool: RankPool,
    scenario: Scenario,
    topologies: Sequence[Topology],
    *,
    tolerance: float | None = None,
    timeout: float = 300.0,
) -> Iterator[Verdict]:
    """Runs a scenario on every topology and yields a verdict on each as it is known, references first.

    In fp64 the reference is one process that runs the naive ops, one unshared sequence at a time. In fp32 it is one
    process with the same ops, and that process itself is compared with Hugging Face, one sequence at a time.

    Args:
        pool: as large as the largest topology.
        scenario: "float64" or "float32".
        topologies: to verify.
        tolerance: largest relative error that is good; None is that of the dtype.
        timeout: of one run, in seconds.

    Raises:
        RanksFailed, RankTimeout: a topology could not be run; names ranks and has their tracebacks.
        AssertionError: a rank observed tensors that it should not have, or an input ran on the wrong ranks.
    """
    tolerance = TOLERANCES[scenario.dtype] if tolerance is None else tolerance
    specs = parameter_specs(scenario)
    alone = pool.run(observe, 1, scenario, Topology(), timeout=timeout)[0]
    if scenario.dtype == "float64":
        reference = pool.run(observe, 1, replace(unshared(scenario), backend="naive"), Topology(), timeout=timeout)[0]
        name = "one process, naive ops, unshared"
    else:
        oracle = pool.run(observe_hugging_face, 1, scenario, timeout=timeout)[0]
        yield _verdict([alone], oracle, Topology(), specs, "Hugging Face, unshared", tolerance)
        reference, name = alone, "one process"
    for topology in topologies:
        if topology.world_size == 1:
            ranks = [alone] if reference is not alone else pool.run(observe, 1, scenario, topology, timeout=timeout)
        else:
            ranks = pool.run(observe, topology.world_size, scenario, topology, timeout=timeout)
        yield _verdict(ranks, reference, topology, specs, name, tolerance)


def _verdict(
    ranks: Sequence[Mapping[str, Tensor]],
    reference: Mapping[str, Tensor],
    topology: Topology,
    specs: Mapping[str, ParamSpec],
    name: str,
    tolerance: float,
) -> Verdict:
    worst = worst_by_kind(compare(ranks, reference, topology, specs))
    return Verdict(run=str(topology), reference=name, tolerance=tolerance, worst=worst)


def parameter_specs(scenario: Scenario) -> dict[str, ParamSpec]:
    """How every parameter of the scenario's model and adapter is laid over tp."""
    with torch.device("meta"):
        model = HybridCausalLM(load_config(scenario.model))
    if scenario.lora is not None:
        add_lora(model, scenario.lora, seed=scenario.seed)
    return {**model.specs, **model.lora_specs}


# ---------------------------------------------------------------- Hugging Face


def observe_hugging_face(scenario: Scenario) -> dict[str, Tensor]:
    """What `observe` would see if transformers (and PEFT) had run the scenario, one unshared sequence at a time.

    Weights and the adapter's start are those of the project's own model on one process; forward, backward and AdamW are
    transformers', PEFT's and torch's.
    """
    torch.use_deterministic_algorithms(True)
    dtype = getattr(torch, scenario.dtype)
    model = _hugging_face(scenario, dtype)
    trained = {_own_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(),
        lr=SMOOTH_ADAM.learning_rate,
        betas=(SMOOTH_ADAM.beta1, SMOOTH_ADAM.beta2),
        eps=SMOOTH_ADAM.eps,
        weight_decay=SMOOTH_ADAM.weight_decay,
        foreach=False,
    )
    inputs = list(chain.from_iterable(scenario.inputs))
    seen: dict[str, Tensor] = {}
    for step in range(scenario.steps):
        optimizer.zero_grad()
        for i, item in enumerate(inputs):
            outputs = _outputs(model, item)
            if step == 0:
                seen |= {f"{kind}/{i}": x for kind, x in zip(("logprobs", "hidden"), outputs) if x is not None}
            loss_of([i], [outputs]).backward()
        if step == 0:
            gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
            seen |= {f"gradient/{name}": g.clone() for name, g in gradients.items()}
            squares = [g.double().square().sum().item() for g in gradients.values()]
            seen["norm"] = torch.tensor([math.sqrt(math.fsum(squares))], dtype=torch.float64)
        for p in trained.values():
            if p.grad is not None:
                p.grad.mul_(1 / 64)
        optimizer.step()
    seen |= {f"parameter/{name}": p for name, p in trained.items()}
    return {name: tensor.detach().clone() for name, tensor in seen.items()}


def _outputs(model: nn.Module, item: ForwardInput) -> tuple[Tensor | None, Tensor | None]:
    target = None if item.target_tokens is None else torch.as_tensor(item.target_tokens)
    ((logprobs, hidden),) = hugging_face_outputs(model, [torch.as_tensor(item.input_tokens)], [target])
    return logprobs, hidden if item.hidden_states else None


def _hugging_face(scenario: Scenario, dtype: torch.dtype) -> nn.Module:
    """Hugging Face's model with the scenario's weights, inside PEFT's with the scenario's adapter if it has one."""
    config = load_config(scenario.model)
    own = HybridCausalLM(config, dtype=dtype)
    if scenario.model == "tiny":
        random_weights(own, scenario.seed)
    else:
        load_directory(own, scenario.model)
    base = hugging_face_model(config, {name: p.detach() for name, p in own.named_parameters()}, dtype)
    base.tie_weights()  # loading made the head's weight a parameter of its own
    if scenario.lora is None:
        plain: nn.Module = base
        return plain
    add_lora(own, scenario.lora, seed=scenario.seed)
    with warnings.catch_warnings():
        # PEFT still asks for this by its old name
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        model: nn.Module = peft.get_peft_model(base, deepcopy(scenario.lora))
    factors = {_own_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    ours = {name: p for name, p in own.named_parameters() if p.requires_grad}
    assert factors.keys() == ours.keys(), f"PEFT adapts other layers: {sorted(factors.keys() ^ ours.keys())}"
    with torch.no_grad():
        for name, p in factors.items():
            p.copy_(ours[name])
    model.train()
    return model


def _own_name(name: str) -> str:
    """`base_model.model.model.x.lora_A.default.weight` (PEFT) -> `model.x.lora_A.weight`."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")
