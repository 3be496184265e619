"""Every parameter's parts, at every tp, are the whole tensor; the model on parts is the whole model."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from deltamesh.models import (
    HybridCausalLM,
    add_lora,
    assemble,
    layers,
    linear_specs,
    load_config,
    param_specs,
    qwen3_5,
    random_weights,
    scatter_to_full,
    take_local,
    tiny_config,
)
from deltamesh.models.lora_targets import lora_param_specs, match_lora_targets
from deltamesh.models.sharding import ParamSpec, Section
from tests.unit.models_common import dense_ops, logprobs, one_sequence, tiny_state, tokens  # noqa: F401

LORA = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)


def every_spec() -> dict[str, ParamSpec]:
    config = tiny_config()
    return {**param_specs(config), **lora_param_specs(match_lora_targets(LORA, config), config)}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", every_spec())
def test_parts_of_all_ranks_are_the_whole_tensor(name: str, tp: int) -> None:
    spec = every_spec()[name]
    full = torch.arange(torch.Size(spec.shape).numel(), dtype=torch.float64).view(spec.shape)
    parts = [take_local(full, spec, rank, tp) for rank in range(tp)]
    assert [tuple(p.shape) for p in parts] == [spec.local_shape(rank, tp) for rank in range(tp)]
    assert torch.equal(assemble(parts, spec), full)
    summed = sum(scatter_to_full(p, spec, rank, tp) for rank, p in enumerate(parts))
    assert torch.equal(summed, full * spec.copies(tp))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_built_without_ranks_concatenate_to_the_random_weights(tp: int) -> None:
    models = []
    for rank in range(tp):
        models.append(HybridCausalLM(tiny_config(), tp_rank=rank, tp_size=tp))
        random_weights(models[-1], seed=5)
        add_lora(models[-1], LORA, seed=6)
    whole = HybridCausalLM(tiny_config())
    random_weights(whole, seed=5)
    add_lora(whole, LORA, seed=6)
    assert dict(whole.named_parameters()).keys() == whole.specs.keys()
    for name, p in whole.named_parameters():
        parts = [dict(m.named_parameters())[name].detach() for m in models]
        assert torch.equal(assemble(parts, whole.specs[name]), p.detach()), name


def test_fused_projection_is_cut_inside_q_inside_k_and_inside_v() -> None:
    spec = param_specs(tiny_config())["model.layers.0.linear_attn.in_proj_qkv.weight"]
    assert spec.ranges(1, 2) == [(24, 48), (72, 96), (176, 256)]  # q 48 rows, k 48 rows, v 160 rows
    conv = param_specs(tiny_config())["model.layers.0.linear_attn.conv1d.weight"]
    assert conv.ranges(1, 2) == spec.ranges(1, 2)


def test_each_query_head_keeps_its_own_output_gate() -> None:
    spec = param_specs(tiny_config())["model.layers.2.self_attn.q_proj.weight"]
    # head h owns rows [48 h, 48 h + 24) of queries and the 24 rows after them of gates
    assert spec.ranges(3, 4) == [(6 * 48, 8 * 48)]


def test_kv_heads_are_replicated_next_to_the_query_heads_that_read_them() -> None:
    spec = param_specs(tiny_config())["model.layers.2.self_attn.k_proj.weight"]
    assert [spec.ranges(rank, 4) for rank in range(4)] == [[(0, 24)], [(0, 24)], [(24, 48)], [(24, 48)]]
    assert (spec.copies(1), spec.copies(2), spec.copies(4)) == (1, 1, 2)
    assert spec.needs_tp_sum(4, sp=False)
    assert not spec.needs_tp_sum(2, sp=False)


def test_vocabulary_shards_are_uneven_and_complete() -> None:
    spec = param_specs(tiny_config())["lm_head.weight"]
    assert [spec.ranges(rank, 4) for rank in range(4)] == [[(0, 65)], [(65, 130)], [(130, 195)], [(195, 259)]]


@pytest.mark.parametrize(
    ("name", "without_sp", "with_sp"),
    [
        ("model.layers.0.input_layernorm.weight", False, True),
        ("model.layers.0.post_attention_layernorm.weight", False, True),
        ("model.norm.weight", False, True),
        ("model.layers.0.linear_attn.norm.weight", True, True),
        ("model.layers.2.self_attn.q_norm.weight", True, True),
        ("model.layers.2.self_attn.k_norm.weight", True, True),
        ("model.layers.0.linear_attn.in_proj_qkv.lora_A.weight", True, True),
        ("model.layers.0.linear_attn.in_proj_qkv.lora_B.weight", False, False),
        ("model.layers.0.linear_attn.out_proj.lora_A.weight", False, False),
        ("model.layers.0.linear_attn.out_proj.lora_B.weight", True, True),
        ("model.layers.0.linear_attn.A_log", False, False),
        ("model.embed_tokens.weight", False, False),
    ],
)
def test_gradients_summed_over_tp(name: str, without_sp: bool, with_sp: bool) -> None:
    spec = every_spec()[name]
    assert (spec.needs_tp_sum(2, sp=False), spec.needs_tp_sum(2, sp=True)) == (without_sp, with_sp)


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (3, r"tp=3 does not divide linear_num_key_heads=4; use tp in \{1, 2, 4\}"),
        (8, r"tp=8 does not divide linear_num_key_heads=4; use tp in \{1, 2, 4\}"),
    ],
)
def test_a_tp_that_splits_heads_is_refused_with_the_choices(tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridCausalLM(tiny_config(), tp_size=tp)


def test_replicated_heads_and_uneven_rows_refuse_a_tp_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="tp=3 is not a multiple of num_key_value_heads=2"):
        Section(name="num_key_value_heads", units=2, replicate=True).range(0, 3)
    with pytest.raises(ValueError, match="without a part of vocab_size=5"):
        Section(name="vocab_size", units=5, uneven=True).range(0, 4)


def test_the_27b_shape_has_27_billion_text_parameters() -> None:
    config = load_config("qwen3.5-27b-shape")
    count = sum(torch.Size(spec.shape).numel() for spec in param_specs(config).values())
    assert 26.5e9 < count < 27.5e9
    assert sum("linear_attn.A_log" in name for name in param_specs(config)) == 48
    assert len(linear_specs(config)) == 48 * 8 + 16 * 7 + 1


class LockStep:
    """Ranks as threads of one process that meet at every sum over tp; the sum is one node of one autograd graph."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)

    def leave(self, y: Tensor, context: Any) -> Tensor:
        self.parts[context.rank] = y
        self.barrier.wait(timeout=60)
        out = torch.stack(self.parts).sum(0)
        self.barrier.wait(timeout=60)
        return out


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize("tp", [2, 4])
def test_the_model_on_parts_is_the_whole_model(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = tokens(13), tokens(13, seed=9)
    whole = HybridCausalLM(tiny_config(), dtype=torch.float64)
    random_weights(whole, seed=0)
    add_lora(whole, LORA, seed=1)
    whole.requires_grad_(True)
    expected = logprobs(whole(x, one_sequence(13)), whole.head_weight)
    expected[torch.arange(13), y].sum().backward()

    meet = LockStep(tp)
    for module in (layers, qwen3_5):
        monkeypatch.setattr(module, "leave_tp", meet.leave)
    monkeypatch.setattr(qwen3_5, "enter_tp_derived", lambda h, context: h)
    models, hidden = [], [torch.empty(0)] * tp
    for rank in range(tp):
        models.append(HybridCausalLM(tiny_config(), tp_rank=rank, tp_size=tp, dtype=torch.float64))
        random_weights(models[-1], seed=0)
        add_lora(models[-1], LORA, seed=1)
        models[-1].requires_grad_(True)

    def work(rank: int) -> None:
        hidden[rank] = models[rank](x, SimpleNamespace(**{**vars(one_sequence(13)), "rank": rank}))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logits = torch.cat([hidden[r] @ models[r].head_weight.T for r in range(tp)], dim=-1)
    torch.testing.assert_close(logits.log_softmax(-1), expected, rtol=1e-10, atol=1e-10)
    logits.log_softmax(-1)[torch.arange(13), y].sum().backward()
    # in this graph every copy of an element has a part of the gradient, as with rows sharded over tp
    for name, p in whole.named_parameters():
        spec = whole.specs[name]
        grads = [dict(m.named_parameters())[name].grad for m in models]
        total = sum(scatter_to_full(g, spec, rank, tp) for rank, g in enumerate(grads))
        torch.testing.assert_close(total, p.grad, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_weights_do_not_depend_on_other_parameters_or_on_the_global_generator() -> None:
    torch.manual_seed(1)
    first = tiny_state(3)
    torch.manual_seed(2)
    second = tiny_state(3)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = tiny_state(4)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    a, b = (first[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert not torch.equal(a, b)
