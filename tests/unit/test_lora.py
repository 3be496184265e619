"""LoRA: what matches, what is refused, and files that PEFT and this code read alike."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from deltamesh.models import (
    HybridCausalLM,
    WeightsError,
    add_lora,
    assemble,
    export_adapter,
    load_adapter,
    load_config,
    load_directory,
    match_lora_targets,
    random_weights,
    save_directory,
    tiny_config,
)
from deltamesh.models.lora_config import UnsupportedLoraError
from deltamesh.models.lora_targets import LoraTargetError
from tests.unit.models_common import (  # noqa: F401 - fixtures
    dense_ops,
    hf_model,
    hf_on_cpu,
    logprobs,
    one_sequence,
    tiny_state,
    tokens,
)

ALL = {"in_proj_qkv": 3, "in_proj_z": 3, "in_proj_b": 3, "in_proj_a": 3, "out_proj": 3, "q_proj": 1, "k_proj": 1}
ALL |= {"v_proj": 1, "o_proj": 1, "gate_proj": 4, "up_proj": 4, "down_proj": 4}


def with_lora(lora: LoraConfig, *, tp_rank: int = 0, tp_size: int = 1, seed: int = 1, **kwargs: Any) -> HybridCausalLM:
    model = HybridCausalLM(tiny_config(), tp_rank=tp_rank, tp_size=tp_size, **kwargs)
    random_weights(model, seed=0)
    add_lora(model, lora, seed=seed)
    return model


def gathered(models: list[HybridCausalLM]) -> dict[str, Tensor]:
    parts = [dict(m.named_parameters()) for m in models]
    return {name: assemble([p[name].detach() for p in parts], s) for name, s in models[0].lora_specs.items()}


def peft_on_hugging_face(lora: LoraConfig) -> PeftModel:
    return get_peft_model(hf_model(tiny_state(0), tiny_config(), torch.float32), deepcopy(lora))


CONFIGS = {
    "all-linear": LoraConfig(r=1, target_modules="all-linear"),
    "names": LoraConfig(r=2, target_modules=["q_proj", "in_proj_qkv", "mlp.down_proj"], lora_alpha=5),
    "regex": LoraConfig(r=2, target_modules=r".*\.layers\.[03]\..*(in_proj_[abz]|up_proj)"),
    "layers": LoraConfig(r=2, target_modules=["in_proj_qkv", "up_proj"], layers_to_transform=[1, 2]),
    "excluded": LoraConfig(r=2, target_modules="all-linear", exclude_modules=["in_proj_a", "layers.0.mlp.up_proj"]),
    "head": LoraConfig(r=2, target_modules=["lm_head", "o_proj"]),
    "patterns": LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj", "up_proj", "out_proj"],
        rank_pattern={"q_proj": 3, "layers.1.mlp.up_proj": 2},
        alpha_pattern={"out_proj": 9},
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_matched_layers_ranks_and_scalings_are_pefts(kind: str) -> None:
    targets = match_lora_targets(CONFIGS[kind], tiny_config())
    theirs = {
        name.removeprefix("base_model.model."): (m.r["default"], m.scaling["default"])
        for name, m in peft_on_hugging_face(CONFIGS[kind]).named_modules()
        if hasattr(m, "lora_A") and hasattr(m, "scaling")
    }
    assert {name: (m.r, m.scaling) for name, m in targets.modules.items()} == theirs


@pytest.mark.usefixtures("dense_ops", "hf_on_cpu")
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_an_exported_adapter_gives_the_same_logprobs_in_peft(kind: str, tp: int, tmp_path: Path) -> None:
    lora = deepcopy(CONFIGS[kind])
    lora.init_lora_weights = False  # B is not zero
    models = [with_lora(lora, tp_rank=rank, tp_size=tp) for rank in range(tp)]
    targets = match_lora_targets(lora, tiny_config())
    export_adapter(gathered(models).items(), lora, targets, tmp_path / "adapter", base_model_name_or_path="tiny")
    base = hf_model(tiny_state(0), tiny_config(), torch.float32)
    x = tokens(21)
    plain = base(input_ids=x[None], use_cache=False).logits[0].log_softmax(-1)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    expected = theirs(input_ids=x[None], use_cache=False).logits[0].log_softmax(-1)
    whole = with_lora(lora)
    ours = logprobs(whole(x, one_sequence(21)), whole.head_weight)
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)
    assert (expected - plain).abs().max() > 1e-2  # the adapter is not without effect


def test_all_linear_covers_every_kind_but_the_head_and_the_convolution() -> None:
    targets = match_lora_targets(CONFIGS["all-linear"], tiny_config())
    assert targets.counts == {**ALL, "lm_head": 0}
    assert targets.available == {**ALL, "lm_head": 1}
    assert "in_proj_qkv 3/3" in targets.summary()
    assert "lm_head 0/1" in targets.summary()
    big = match_lora_targets(CONFIGS["all-linear"], load_config("qwen3.5-27b-shape"))
    assert (big.counts["in_proj_qkv"], big.counts["q_proj"], big.counts["up_proj"]) == (48, 16, 64)


def test_names_that_match_nothing_are_reported_beside_those_that_do() -> None:
    targets = match_lora_targets(LoraConfig(target_modules=["q_proj", "in_proj_qkvz"]), tiny_config())
    assert targets.unmatched == ("in_proj_qkvz",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": ["c_attn"]}, ["matches no linear layer", "in_proj_qkv", "q_proj"]),
        ({"target_modules": ["conv1d"]}, ["not linear layers", "model.layers.0.linear_attn.conv1d"]),
        ({"target_modules": ["embed_tokens", "q_proj"]}, ["not linear layers", "model.embed_tokens"]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, ["matches no linear layer", "[0]"]),
    ],
)
def test_targets_that_cannot_carry_a_lora_are_refused(options: dict[str, Any], words: list[str]) -> None:
    model = HybridCausalLM(tiny_config())
    with pytest.raises(LoraTargetError) as error:
        add_lora(model, LoraConfig(**options), seed=0)
    assert all(word in str(error.value) for word in words)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_dropout": 0.1}, "lora_dropout=0.1"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"target_parameters": ["x"]}, "target_parameters=['x']"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=[1]"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=[1]"),
        ({"layer_replication": [(0, 2)]}, "layer_replication="),
        ({"target_modules": None}, "target_modules=None"),
    ],
)
def test_options_that_are_not_honoured_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    lora = LoraConfig(**{"target_modules": ["q_proj"], **options})
    with pytest.raises(UnsupportedLoraError) as error:
        match_lora_targets(lora, tiny_config())
    assert name in str(error.value)


def test_only_factors_train_and_stay_fp32_in_a_bf16_model() -> None:
    model = with_lora(CONFIGS["all-linear"], dtype=torch.bfloat16)
    factors = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    assert factors.keys() == model.lora_specs.keys()
    assert {p.dtype for p in factors.values()} == {torch.float32}
    assert all(p.requires_grad == (name in factors) for name, p in model.named_parameters())
    model.to(torch.bfloat16)
    assert {p.dtype for name, p in model.named_parameters() if ".lora_" in name} == {torch.float32}
    double = with_lora(CONFIGS["all-linear"], dtype=torch.float64)
    assert {p.dtype for p in double.parameters()} == {torch.float64}


def test_factors_start_as_pefts_do() -> None:
    lora = LoraConfig(r=64, target_modules=["down_proj"])
    factors = gathered([with_lora(lora)])
    a = torch.stack([t for name, t in factors.items() if "lora_A" in name])
    bound = 104**-0.5  # Kaiming uniform with a = sqrt(5): 1 / sqrt(in)
    assert 0.98 * bound < a.abs().max() <= bound
    assert abs(a.std().item() - bound / 3**0.5) < 0.02 * bound
    assert not any(t.any() for name, t in factors.items() if "lora_B" in name)
    lora = LoraConfig(r=64, target_modules=["down_proj"], init_lora_weights="gaussian")
    a = torch.stack([t for name, t in gathered([with_lora(lora)]).items() if "lora_A" in name])
    assert abs(a.std().item() - 1 / 64) < 0.02 / 64


@pytest.mark.usefixtures("dense_ops")
def test_a_fresh_lora_changes_nothing_and_trains_from_the_first_step() -> None:
    plain = HybridCausalLM(tiny_config())
    random_weights(plain, seed=0)
    model = with_lora(CONFIGS["all-linear"])
    x = tokens(9)
    out = model(x, one_sequence(9))
    assert torch.equal(out, plain(x, one_sequence(9)))
    out.pow(3).sum().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None and bool(p.grad.any())) == (".lora_B." in name), name


@pytest.mark.parametrize("conditional_generation", [False, True])
def test_an_adapter_saved_at_tp_4_loads_at_tp_2(tmp_path: Path, conditional_generation: bool) -> None:
    lora = deepcopy(CONFIGS["patterns"])
    lora.init_lora_weights = False
    full = gathered([with_lora(lora, tp_rank=rank, tp_size=4) for rank in range(4)])
    export_adapter(
        full.items(),
        lora,
        match_lora_targets(lora, tiny_config()),
        tmp_path / "adapter",
        base_model_name_or_path="tiny",
        conditional_generation=conditional_generation,
    )
    key = "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight"
    if conditional_generation:
        key = key.replace("model.layers", "model.language_model.layers")
    assert key in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    models = [with_lora(lora, tp_rank=rank, tp_size=2, seed=77) for rank in range(2)]
    for model in models:
        load_adapter(model, tmp_path / "adapter")
    assert all(torch.equal(t, full[name]) for name, t in gathered(models).items())


def test_the_adapter_configuration_names_its_base_and_its_layers(tmp_path: Path) -> None:
    lora = CONFIGS["all-linear"]
    targets = match_lora_targets(lora, tiny_config())
    factors = gathered([with_lora(lora)])
    export_adapter(factors.items(), lora, targets, tmp_path / "a", base_model_name_or_path="some/base")
    written = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "some/base"
    assert written["target_modules"] == sorted(ALL)
    assert written["peft_type"] == "LORA"
    assert lora.base_model_name_or_path is None  # the caller's object is left as it was
    with pytest.raises(FileExistsError):
        export_adapter(factors.items(), lora, targets, tmp_path / "a", base_model_name_or_path=None)
    factors.popitem()
    with pytest.raises(ValueError, match=r"missing \['model\.layers\.3\.mlp\.down_proj\.lora_B\.weight'\]"):
        export_adapter(factors.items(), lora, targets, tmp_path / "b", base_model_name_or_path=None)
    assert not (tmp_path / "b").exists()


def test_an_adapter_of_another_shape_or_scale_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    targets = match_lora_targets(lora, tiny_config())
    export_adapter(gathered([with_lora(lora)]).items(), lora, targets, tmp_path / "a", base_model_name_or_path=None)
    for other, error, words in (
        (LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=16), LoraTargetError, "by 4.0, the model by 8.0"),
        (LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"]), WeightsError, "wrong shape"),
        (
            LoraConfig(r=2, target_modules=["q_proj", "k_proj"]),
            WeightsError,
            "missing: model.layers.2.self_attn.k_proj",
        ),
        (LoraConfig(r=2, target_modules=["k_proj"]), WeightsError, "unknown: base_model.model.model.layers.2"),
    ):
        model = with_lora(other, seed=3)
        before = gathered([model])
        with pytest.raises(error) as raised:
            load_adapter(model, tmp_path / "a")
        assert words in str(raised.value)
        assert all(torch.equal(t, before[name]) for name, t in gathered([model]).items())
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors"):
        load_adapter(with_lora(lora), tmp_path)


def test_base_weights_load_after_the_lora_is_on(tmp_path: Path) -> None:
    save_directory(tiny_state(4).items(), tiny_config(), tmp_path / "model", dtype=torch.float32)
    model = with_lora(CONFIGS["all-linear"])
    before = gathered([model])
    load_directory(model, tmp_path / "model")
    assert torch.equal(model.model.norm.weight, tiny_state(4)["model.norm.weight"])
    assert all(torch.equal(t, before[name]) for name, t in gathered([model]).items())


def test_a_second_lora_and_a_lora_on_a_tied_head_are_refused() -> None:
    model = with_lora(CONFIGS["all-linear"])
    with pytest.raises(ValueError, match="has a LoRA already"):
        add_lora(model, CONFIGS["names"], seed=0)
    config = tiny_config()
    config.tie_word_embeddings = True
    with pytest.raises(LoraTargetError, match="its weight is the embedding's"):
        match_lora_targets(CONFIGS["head"], config)
