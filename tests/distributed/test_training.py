"""Optimizer steps, saved files and bad input on a mesh."""

import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from deltamesh.distributed.agreement import RankDisagreement
from deltamesh.models import param_specs, tiny_config
from deltamesh.models.tiny import random_state
from deltamesh.testing.equivalence import SMOOTH_ADAM, forked_inputs, relative_error
from deltamesh.testing.oracle import hugging_face_model, hugging_face_outputs
from deltamesh.testing.rank_pool import RankPool
from deltamesh.topology import Topology
from deltamesh.train.micro_batches import ForwardInput
from deltamesh.train.optim import AdamParams, StepResult
from deltamesh.train.trainer_rank import TrainerRank

LORA = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, use_rslora=True)
INPUTS = forked_inputs()
FLAT = [x for group in INPUTS for x in group]


def backward(rank: TrainerRank, scale: float = 1.0) -> dict[int, Tensor]:
    """One forward and backward over the inputs; this dp rank's log-probs."""
    seen = {}
    for batch in rank.forward_micro_batches(INPUTS):
        (-scale * torch.stack([o.target_logprobs.sum() for o in batch.outputs]).sum()).backward()
        seen |= {i: o.target_logprobs.detach() for i, o in zip(batch.indices, batch.outputs, strict=True)}
    return seen


# ---------------------------------------------------------------- steps


def clipped_steps(topology: Topology, clip: float | None) -> tuple[list[StepResult], dict[str, Tensor]]:
    rank = TrainerRank.from_pretrained("tiny", topology=topology, dtype=torch.float64)
    results = []
    for _ in range(2):
        backward(rank)
        params = AdamParams(learning_rate=1e-2, eps=1e-2, weight_decay=0.1, grad_clip_norm=clip)
        results.append(rank.optim_step(params, scale_grads=0.5))
    return results, dict(rank.full_tensors(rank.trainable_parameters()))


def test_clipping_uses_the_global_norm_on_every_topology(rank_pool: RankPool) -> None:
    """The result of torch's own AdamW and clip_grad_norm_ on the whole gradient."""
    expected = expected_steps(clip=3.0)
    for topology in (Topology(), Topology(tp=4), Topology(dp=2, cp=2, tp=2), Topology(cp=2, tp=2, sp=False)):
        for results, parameters in rank_pool.run(clipped_steps, topology.world_size, topology, 3.0):
            for result, norm in zip(results, expected[0], strict=True):
                assert math.isclose(result.grad_norm, norm, rel_tol=1e-10) and not result.skipped
            for name, p in parameters.items():
                assert relative_error(p, expected[1][name]) < 1e-10, (topology, name)


def expected_steps(clip: float) -> tuple[list[float], dict[str, Tensor]]:
    rank = TrainerRank.from_pretrained("tiny", topology=Topology(), dtype=torch.float64)
    parameters = rank.trainable_parameters()
    adamw = torch.optim.AdamW(parameters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.1)
    norms = []
    for _ in range(2):
        backward(rank, scale=0.5)
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), clip).item())
        adamw.step()
        adamw.zero_grad()
    return norms, {name: p.detach() for name, p in parameters.items()}


def step_with_nan(topology: Topology, bad_rank: int) -> tuple[StepResult, StepResult, bool]:
    rank = TrainerRank.from_pretrained("tiny", topology=topology, lora=LORA)
    before = {name: p.detach().clone() for name, p in rank.trainable_parameters().items()}
    backward(rank)
    if rank.mesh.world.rank == bad_rank:
        next(iter(rank.trainable_parameters().values())).grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
    skipped = rank.optim_step(SMOOTH_ADAM)
    unchanged = all(torch.equal(p, before[name]) for name, p in rank.trainable_parameters().items())
    backward(rank)
    return skipped, rank.optim_step(SMOOTH_ADAM), unchanged


@pytest.mark.parametrize("topology", [Topology(dp=2, tp=2), Topology(cp=2, tp=2)], ids=str)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    rank_pool: RankPool, topology: Topology
) -> None:
    for skipped, taken, unchanged in rank_pool.run(step_with_nan, 4, topology, 3):
        assert skipped.skipped and skipped.step == 0 and unchanged and math.isnan(skipped.grad_norm)
        assert not taken.skipped and taken.step == 1 and math.isfinite(taken.grad_norm)


def step_without_work(topology: Topology) -> tuple[int, StepResult]:
    """Fewer items than dp ranks: a rank without micro-batches still takes the step."""
    rank = TrainerRank.from_pretrained("tiny", topology=topology, lora=LORA)
    batches = 0
    for batch in rank.forward_micro_batches([ForwardInput(input_tokens=[1, 2, 3], target_tokens=[2, 3, 4])]):
        batch.outputs[0].target_logprobs.sum().backward()
        batches += 1
    return batches, rank.optim_step(SMOOTH_ADAM)


def test_a_dp_rank_without_items_takes_the_same_step(rank_pool: RankPool) -> None:
    results = rank_pool.run(step_without_work, 2, Topology(dp=2))
    assert [batches for batches, _ in results] == [1, 0]
    assert results[0][1] == results[1][1] and results[0][1].grad_norm > 0


def bf16_steps(topology: Topology) -> tuple[dict[str, torch.dtype], float, float]:
    rank = TrainerRank.from_pretrained("tiny", topology=topology, dtype=torch.bfloat16)
    losses = []
    for _ in range(4):
        losses.append(-float(sum(lp.double().sum() for lp in backward(rank).values())))
        rank.optim_step(AdamParams(learning_rate=3e-4), scale_grads=1e-3)
    return {name: p.dtype for name, p in rank.trainable_parameters().items()}, losses[0], losses[-1]


def test_bf16_trains_and_keeps_decay_rates_in_fp32(rank_pool: RankPool) -> None:
    results = rank_pool.run(bf16_steps, 4, Topology(cp=2, tp=2))
    for dtypes, first, last in results:
        assert last < first - 1
        for name, dtype in dtypes.items():
            assert dtype == (torch.float32 if name.endswith(("A_log", "dt_bias")) else torch.bfloat16)


# ---------------------------------------------------------------- files


def train_and_export(topology: Topology, path: str) -> dict[int, Tensor]:
    rank = TrainerRank.from_pretrained("tiny", topology=topology, lora=LORA)
    backward(rank)
    rank.optim_step(SMOOTH_ADAM, scale_grads=0.01)
    rank.export_lora(path)
    return backward(rank)


@pytest.mark.parametrize("topology", [Topology(), Topology(cp=2, tp=4), Topology(dp=2, cp=2, tp=2)], ids=str)
def test_peft_loads_the_exported_adapter_and_gives_the_same_logprobs(
    rank_pool: RankPool, topology: Topology, tmp_path: Path
) -> None:
    ours: dict[int, Tensor] = {}
    for seen in rank_pool.run(train_and_export, topology.world_size, topology, str(tmp_path / "adapter")):
        ours |= seen
    config = tiny_config()
    base = hugging_face_model(config, random_state(param_specs(config), 0), torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    theirs = hugging_face_outputs(
        model, [torch.tensor(x.input_tokens) for x in FLAT], [torch.tensor(x.target_tokens) for x in FLAT]
    )
    with model.disable_adapter():
        first = torch.tensor(FLAT[0].input_tokens), torch.tensor(FLAT[0].target_tokens)
        plain = hugging_face_outputs(model, first[:1], first[1:])
    assert relative_error(ours[0], plain[0][0]) > 1e-2, "the adapter changes the model"
    assert len(ours) == len(FLAT)
    for i, (logprobs, _) in enumerate(theirs):
        assert logprobs is not None
        assert relative_error(ours[i], logprobs) < 2e-5, i


def save_base(topology: Topology, path: str) -> None:
    TrainerRank.from_pretrained("tiny", topology=topology, seed=5).save_pretrained(path)


def load_base(path: str, topology: Topology) -> dict[int, Tensor]:
    return backward(TrainerRank.from_pretrained(path, topology=topology))


def test_weights_saved_at_one_topology_load_at_another_and_in_transformers(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    rank_pool.run(save_base, 4, Topology(cp=2, tp=2), path)
    alone = rank_pool.run(load_base, 1, path, Topology())[0]
    for seen in rank_pool.run(load_base, 4, path, Topology(tp=4)):
        assert all(relative_error(seen[i], alone[i]) < 2e-5 for i in alone)
    hf = Qwen3_5ForCausalLM.from_pretrained(path)
    state = random_state(param_specs(tiny_config()), 5)
    for name, p in hf.named_parameters():
        assert torch.equal(p, state[name]), name
    outcomes = rank_pool.outcomes(save_base, 4, Topology(cp=2, tp=2), path)
    assert all(isinstance(o, RankDisagreement) and "exists already" in str(o) for o in outcomes)


# ---------------------------------------------------------------- bad input


def forward(inputs: list[ForwardInput], topology: Topology) -> None:
    list(TrainerRank.from_pretrained("tiny", topology=topology).forward_micro_batches(inputs))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "no inputs were given"),
        ([[]], "item 0 is an empty group"),
        ([ForwardInput(input_tokens=[])], "input 0: input_tokens is empty"),
        ([ForwardInput(input_tokens=[1, 259])], r"input_tokens holds 259; token ids of this model are 0 to 258"),
        ([ForwardInput(input_tokens=[1, -1])], r"input 0: input_tokens holds token id -1 at position 1"),
        ([ForwardInput(input_tokens=[1, 2], target_tokens=[1, 999])], "target_tokens holds 999"),
        (
            [ForwardInput(input_tokens=[1, 2], target_tokens=[1])],
            "target_tokens has length 1, input_tokens has length 2",
        ),
        ([ForwardInput(input_tokens=[[1, 2]])], "shape"),
        ([ForwardInput(input_tokens=[1.5])], "integers"),
        (["text"], "pass ForwardInput objects"),
        ([5], "item 0 is a int; pass ForwardInput objects or groups of them"),
        (ForwardInput(input_tokens=[1]), "a single ForwardInput was given"),
        ([ForwardInput(input_tokens=[1], hidden_states=None)], "hidden_states=None is not True or False"),
    ],
)
def test_bad_inputs_are_the_same_clear_error_on_every_rank(
    rank_pool: RankPool, bad: list[ForwardInput], message: str
) -> None:
    outcomes = rank_pool.outcomes(forward, 2, bad, Topology(cp=2))
    assert all(isinstance(o, ValueError | TypeError) for o in outcomes), outcomes
    assert len({str(o) for o in outcomes}) == 1
    with pytest.raises((ValueError, TypeError), match=message):
        raise outcomes[0]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("topology", "arguments", "message"),
    [
        (Topology(cp=3), {}, "needs 3 ranks, but the world has 2"),
        (Topology(tp=2), {"dtype": torch.float16}, "dtype=torch.float16 is not supported"),
        (Topology(tp=2), {"max_rows": 0}, "max_rows=0 must be at least 1"),
        (Topology(tp=2), {"recompute": "some"}, "recompute='some' is unknown"),
        (Topology(tp=2), {"name_or_path": "./nowhere"}, "does not exist"),
        (Topology(tp=2), {"lora": LoraConfig(target_modules="all-linear", use_dora=True)}, "use_dora"),
        (Topology(tp=2), {"lora": LoraConfig(target_modules=["no_such_proj"])}, "matches no linear layer"),
        (Topology(tp=2), {"name_or_path": "qwen3.5-27b-shape"}, "has no weights"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_settings_are_the_same_clear_error_on_every_rank(
    rank_pool: RankPool, topology: Topology, arguments: dict[str, object], message: str
) -> None:
    outcomes = rank_pool.outcomes(build, 2, topology, arguments)
    assert len({(type(o), str(o)) for o in outcomes}) == 1, outcomes
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        raise outcomes[0]  # type: ignore[misc]


def build(topology: Topology, arguments: dict[str, object]) -> None:
    TrainerRank.from_pretrained(topology=topology, **({"name_or_path": "tiny"} | arguments))  # type: ignore[arg-type]


def test_a_tp_that_does_not_divide_the_heads_lists_what_fits(rank_pool: RankPool) -> None:
    outcomes = rank_pool.outcomes(build, 3, Topology(tp=3), {})
    assert {str(o) for o in outcomes} == {"tp=3 does not divide linear_num_key_heads=4; use tp in {1, 2, 4}"}
