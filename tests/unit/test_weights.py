"""Checkpoints: read by parts, checked whole, written whole or not at all."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from deltamesh.models import (
    HybridCausalLM,
    WeightsError,
    assemble,
    load_config,
    load_directory,
    random_weights,
    save_directory,
    tiny_config,
)
from tests.unit.models_common import tiny_state


def loaded(path: Path, tp_rank: int = 0, tp_size: int = 1, dtype: torch.dtype = torch.float32) -> HybridCausalLM:
    model = HybridCausalLM(load_config(path), tp_rank=tp_rank, tp_size=tp_size, dtype=dtype)
    load_directory(model, path)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_directory(tiny_state(0).items(), tiny_config(), tmp_path / "model", dtype=torch.float32)
    return tmp_path / "model"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_parts_read_at_any_tp_are_the_saved_tensors(saved: Path, tp: int) -> None:
    models = [dict(loaded(saved, rank, tp).named_parameters()) for rank in range(tp)]
    specs = HybridCausalLM(tiny_config()).base_specs
    for name, full in tiny_state(0).items():
        assert torch.equal(assemble([m[name].detach() for m in models], specs[name]), full), name


def test_a_checkpoint_saved_from_parts_loads_in_hugging_face(tmp_path: Path) -> None:
    models = [HybridCausalLM(tiny_config(), tp_rank=rank, tp_size=4) for rank in range(4)]
    for model in models:
        random_weights(model, seed=2)

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name, spec in models[0].base_specs.items():
            yield name, assemble([dict(m.named_parameters())[name].detach() for m in models], spec)

    save_directory(gathered(), tiny_config(), tmp_path / "model", dtype=torch.float32)
    theirs = dict(Qwen3_5ForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert theirs.keys() == tiny_state(2).keys()
    for name, full in tiny_state(2).items():
        assert torch.equal(theirs[name], full), name


def test_a_checkpoint_saved_by_hugging_face_loads_here(tmp_path: Path) -> None:
    config = tiny_config()
    theirs = Qwen3_5ForCausalLM(config)
    theirs.save_pretrained(tmp_path / "model", max_shard_size="30KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    ours = dict(loaded(tmp_path / "model").named_parameters())
    for name, p in theirs.named_parameters():
        assert torch.equal(ours[name], p), name


def test_shards_respect_the_limit_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    limit = 40_000
    save_directory(tiny_state(0).items(), tiny_config(), tmp_path / "model", dtype=torch.float32, max_shard_bytes=limit)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tiny_state(0).keys()
    files = sorted((tmp_path / "model").glob("model-*.safetensors"))
    assert len(files) > 3
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.numel() * 4 for t in tensors.values()) <= limit
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tiny_state(0).values())
    parameters = dict(loaded(tmp_path / "model").named_parameters())
    assert all(torch.equal(parameters[name], full) for name, full in tiny_state(0).items())


def test_decay_parameters_stay_fp32_through_cast_save_and_load(tmp_path: Path) -> None:
    model = HybridCausalLM(tiny_config())
    random_weights(model, seed=0)
    for step in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to("cpu")):
        step(model)
    state = tiny_state(0)
    kept = [name for name in state if name.endswith(("A_log", "dt_bias"))]
    assert len(kept) == 6
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], state[name]) for name in kept)
    assert {p.dtype for name, p in parameters.items() if name not in kept} == {torch.bfloat16}
    save_directory(
        ((n, p.detach()) for n, p in parameters.items()), tiny_config(), tmp_path / "model", dtype=torch.bfloat16
    )
    again = dict(loaded(tmp_path / "model", dtype=torch.bfloat16).named_parameters())
    assert all(torch.equal(again[name], state[name]) for name in kept)
    assert all(torch.equal(again[name], p) for name, p in parameters.items())
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_cast_keeps_the_gradient_of_decay_parameters_in_fp32() -> None:
    model = HybridCausalLM(tiny_config())
    random_weights(model, seed=0)
    mixer = model.model.layers[0].linear_attn
    mixer.A_log.grad = torch.full_like(mixer.A_log, 1 / 3)
    model.to(torch.bfloat16)
    assert mixer.A_log.grad.dtype == torch.float32
    assert model.double().model.layers[0].linear_attn.A_log.dtype == torch.float64


def test_vision_language_checkpoints_give_their_text_part(tmp_path: Path) -> None:
    state = {name.replace("model.", "model.language_model.", 1): t for name, t in tiny_state(0).items()}
    state |= {"model.visual.patch_embed.proj.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    tiny_config().save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    parameters = dict(loaded(tmp_path).named_parameters())
    assert all(torch.equal(parameters[name], full) for name, full in tiny_state(0).items())


def test_missing_unknown_and_misshapen_tensors_are_listed_and_change_nothing(saved: Path) -> None:
    model = loaded(saved)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name: t + 1 for name, t in tiny_state(0).items()}
    del state["model.norm.weight"]
    state["model.layers.0.mlp.gate_proj.bias"] = torch.zeros(104)
    state["lm_head.weight"] = torch.zeros(260, 44)
    save_file(state, saved / "model.safetensors")
    with pytest.raises(WeightsError) as error:
        load_directory(model, saved)
    for text in (
        "missing: model.norm.weight (44,)",
        "unknown: model.layers.0.mlp.gate_proj.bias",
        "wrong shape: lm_head.weight is (260, 44), the model needs (259, 44)",
    ):
        assert text in str(error.value)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_tied_model_reads_and_writes_no_head(tmp_path: Path) -> None:
    config = tiny_config()
    config.tie_word_embeddings = True
    state = tiny_state(0)
    head = state.pop("lm_head.weight")
    save_directory(state.items(), config, tmp_path / "model", dtype=torch.float32)
    assert torch.equal(loaded(tmp_path / "model").lm_head.weight, state["model.embed_tokens.weight"])
    hugging_face = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(hugging_face.lm_head.weight, state["model.embed_tokens.weight"])
    same = state["model.embed_tokens.weight"].clone()
    save_file({**state, "lm_head.weight": same}, tmp_path / "model" / "model.safetensors")
    assert torch.equal(loaded(tmp_path / "model").lm_head.weight, same)
    save_file({**state, "lm_head.weight": head}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(WeightsError, match=r"not equal: lm_head\.weight and model\.embed_tokens\.weight"):
        loaded(tmp_path / "model")


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(tiny_state(0).items()))
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        save_directory(broken(), tiny_config(), tmp_path / "model", dtype=torch.float32)
    state = tiny_state(0)
    state.pop("model.norm.weight")
    with pytest.raises(WeightsError, match=r"without model\.norm\.weight"):
        save_directory(state.items(), tiny_config(), tmp_path / "model", dtype=torch.float32)
    state["model.norm.weight"] = torch.zeros(11)
    with pytest.raises(WeightsError, match=r"of shape \(11,\): the whole is \(44,\)"):
        save_directory(state.items(), tiny_config(), tmp_path / "model", dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_path_is_never_overwritten(saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="exists already"):
        save_directory(tiny_state(1).items(), tiny_config(), saved, dtype=torch.float32)
    assert (saved / "model.safetensors").read_bytes() == before


def test_a_path_that_appears_during_a_save_is_not_replaced(tmp_path: Path) -> None:
    def slow() -> Iterator[tuple[str, Tensor]]:
        yield from tiny_state(0).items()
        (tmp_path / "model").mkdir()  # another process was faster

    with pytest.raises(FileExistsError, match="exists already"):
        save_directory(slow(), tiny_config(), tmp_path / "model", dtype=torch.float32)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert list((tmp_path / "model").iterdir()) == []


def test_directories_without_weights_say_what_is_missing(saved: Path, tmp_path: Path) -> None:
    model = HybridCausalLM(tiny_config())
    (saved / "model.safetensors").rename(saved / "other.safetensors")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_directory(model, saved)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="model-00001-of-00002"):
        load_directory(model, saved)
    with pytest.raises(FileNotFoundError, match="not a directory"):
        load_directory(model, tmp_path / "nowhere")


def test_an_unloaded_model_is_nan() -> None:
    assert all(p.isnan().all() for p in HybridCausalLM(tiny_config()).parameters())


def test_a_hub_id_is_downloaded_by_the_hub_client(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(saved)

    monkeypatch.setattr("deltamesh.models.files.snapshot_download", snapshot_download)
    model = HybridCausalLM(tiny_config())
    load_directory(model, "someone/some-model")
    assert torch.equal(model.model.norm.weight, tiny_state(0)["model.norm.weight"])
    assert asked[0][0] == "someone/some-model"
    assert "*.safetensors" in asked[0][1]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    model = HybridCausalLM(tiny_config())
    state = tiny_state()
    save_directory(state.items(), tiny_config(), tmp_path / "cut", dtype=torch.float32)
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(WeightsError, match=r"model\.safetensors is no whole safetensors file"):
        load_directory(model, tmp_path / "cut")
    save_directory(state.items(), tiny_config(), tmp_path / "shards", dtype=torch.float32, max_shard_bytes=50_000)
    for text in ("{", "{}", '{"weight_map": 3}'):
        (tmp_path / "shards" / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=r"index\.json is no index of weights"):
            load_directory(model, tmp_path / "shards")


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    state = tiny_state()
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.int32)
    save_directory(state.items(), tiny_config(), tmp_path / "model", dtype=torch.float32)
    with pytest.raises(WeightsError, match=r"not floating point: model\.norm\.weight is I32"):
        load_directory(HybridCausalLM(tiny_config()), tmp_path / "model")
