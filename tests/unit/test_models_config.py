"""Configurations and the byte tokenizer."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen3_5Config

from deltamesh.data import ByteTokenizer
from deltamesh.models import UnsupportedConfigError, load_config, tiny_config, validate_config
from deltamesh.models.config import text_config


def test_text_and_outer_configurations_load_alike(tmp_path: Path) -> None:
    text = tiny_config()
    text.save_pretrained(tmp_path / "text")
    outer = Qwen3_5Config(text_config=text.to_dict())
    outer.save_pretrained(tmp_path / "outer")
    assert json.loads((tmp_path / "outer" / "config.json").read_text())["model_type"] == "qwen3_5"
    first, second = (load_config(tmp_path / kind) for kind in ("text", "outer"))
    assert first.layer_types == second.layer_types == text.layer_types
    assert first.to_diff_dict() == second.to_diff_dict()


def test_outer_configuration_says_whether_embeddings_are_tied(tmp_path: Path) -> None:
    text = tiny_config().to_dict()
    del text["tie_word_embeddings"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text}))
    assert load_config(tmp_path).tie_word_embeddings is True
    text["tie_word_embeddings"] = False
    path.write_text(json.dumps({"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text}))
    with pytest.raises(UnsupportedConfigError, match="make the two equal"):
        load_config(tmp_path)


def test_every_unsupported_field_is_named_in_one_error() -> None:
    config = tiny_config()
    config.hidden_act = "gelu"
    config.attention_bias = True
    config.attention_dropout = 0.1
    config.rope_parameters["rope_type"] = "yarn"
    config.linear_num_key_heads = 3
    with pytest.raises(UnsupportedConfigError) as error:
        validate_config(config)
    for word in ("gelu", "attention_bias", "attention_dropout=0.1", "yarn", "linear_num_key_heads=3"):
        assert word in str(error.value)


def test_another_model_family_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedConfigError, match="'llama' is not supported"):
        text_config(LlamaConfig())


def test_missing_paths_and_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_config(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_config(tmp_path / "nothing")


def test_the_tiny_model_reads_the_byte_tokenizer() -> None:
    tokenizer, config = ByteTokenizer(), tiny_config()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (
        config.vocab_size,
        config.bos_token_id,
        config.eos_token_id,
    )
