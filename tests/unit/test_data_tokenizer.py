"""Tokenizers: bytes, and transformers tokenizers with and without generation tags."""

import json

import pytest

from deltamesh.data import ByteTokenizer, Tokenizer, load_jsonl, load_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ m.content | trim }}{{ '<|im_end|>\\n' }}{% endfor %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
# As some reasoning models do: the reasoning of all turns but the last is left out, so a growing prefix of the
# conversation is not a prefix of the whole.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{% if loop.last %}{{ '<think>\\n' + (parts[0].replace('<think>', '') if parts | length > 1 else '')"
    " + '\\n</think>\\n\\n' }}{% endif %}{{ parts[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('the first turn must be the user') }}{% endif %}hello"
CHAT = [
    {"role": "user", "content": "one plus one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "two two"},
]


def save_tokenizer(folder, template, *, bos=False):
    """A byte-level tokenizer without merges, saved as a user would have it on disk."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = Rust(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    if bos:
        rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|im_end|>", bos_token="<s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return load_tokenizer(str(folder))


def learned_text(tokenizer, messages):
    chat = tokenizer.render_chat(messages)
    assert len(chat.tokens) == len(chat.learned)
    runs, inside = [], False
    for token, learned in zip(chat.tokens, chat.learned, strict=True):
        if learned and not inside:
            runs.append([])
        if learned:
            runs[-1].append(token)
        inside = learned
    return [tokenizer.inner.decode(run) for run in runs]


def test_bytes_round_trip_and_specials_are_left_out():
    tokenizer = ByteTokenizer()
    assert isinstance(tokenizer, Tokenizer)
    text = "naïve 🦆\n<eos>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < 256
    assert tokenizer.decode([256, 104, 257, 258]) == "h"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (256, 257, 258, 259)


def test_bytes_refuse_tokens_outside_the_vocabulary():
    with pytest.raises(ValueError, match=r"token 259 at position 1 is outside \[0, 259\)"):
        ByteTokenizer().decode([1, 259])


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_assistant_turns_and_their_ends_are_learned_with_and_without_tags(tmp_path, template):
    tokenizer = save_tokenizer(tmp_path, template)
    assert isinstance(tokenizer, Tokenizer)
    assert learned_text(tokenizer, CHAT) == ["two<|im_end|>", "two two<|im_end|>"]


def test_a_template_that_drops_earlier_reasoning_still_marks_every_turn(tmp_path):
    tokenizer = save_tokenizer(tmp_path, THINKING)
    chat = [*CHAT[:1], {"role": "assistant", "content": "<think>hm</think>two"}, *CHAT[2:]]
    assert learned_text(tokenizer, chat) == ["two<|im_end|>", "two two<|im_end|>"]
    assert learned_text(tokenizer, chat[:2]) == ["hm\n</think>\n\ntwo<|im_end|>"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [("", "<|im_end|>"), ("  two ", "two<|im_end|>"), ("é🦆", "é🦆<|im_end|>"), ("user\n", "user<|im_end|>")],
)
def test_odd_contents_are_marked_exactly(tmp_path, content, expected):
    tokenizer = save_tokenizer(tmp_path, CHATML)
    assert learned_text(tokenizer, [CHAT[0], {"role": "assistant", "content": content}]) == [expected]


def test_chat_of_a_saved_tokenizer_loads_from_jsonl(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer", CHATML)
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    [(example,)] = load_jsonl(tmp_path / "data.jsonl", tokenizer)
    assert tokenizer.decode(example.target_tokens[example.target_tokens != -100].tolist()) == "twotwo two"
    assert example.input_tokens.max() < tokenizer.vocab_size == 259


def test_bos_is_used_only_where_the_tokenizer_uses_it(tmp_path):
    without, with_bos = save_tokenizer(tmp_path / "a", CHATML), save_tokenizer(tmp_path / "b", CHATML, bos=True)
    assert without.bos_id is None
    assert with_bos.bos_id == 258
    assert with_bos.encode("a") == without.encode("a")
    assert len(without.encode("a")) == 1
    (tmp_path / "data.jsonl").write_text('{"prompt": "", "completions": ["b"]}\n')
    [(example,)] = load_jsonl(tmp_path / "data.jsonl", with_bos)
    assert example.input_tokens.tolist() == [258, *with_bos.encode("b"), with_bos.eos_id]
    with pytest.raises(ValueError, match=r"data\.jsonl:1: prompt: the prompt is empty and this tokenizer has no bos"):
        load_jsonl(tmp_path / "data.jsonl", without)


def test_what_the_template_refuses_is_an_error_with_the_line(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer", STRICT)
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": CHAT[1:]}) + "\n")
    with pytest.raises(ValueError, match=r"data\.jsonl:1: messages: .*the first turn must be the user"):
        load_jsonl(tmp_path / "data.jsonl", tokenizer)
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    with pytest.raises(ValueError, match="leaves out the content of message 1"):
        load_jsonl(tmp_path / "data.jsonl", tokenizer)


def test_a_tokenizer_without_chat_template_is_refused_with_the_line(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer", None)
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    with pytest.raises(ValueError, match=r"data\.jsonl:1: messages: .*chat template"):
        load_jsonl(tmp_path / "data.jsonl", tokenizer)


def test_a_tokenizer_without_eos_needs_append_eos_false(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer", CHATML)
    tokenizer.inner.eos_token = None
    (tmp_path / "data.jsonl").write_text('{"tokens": [1, 2]}\n')
    with pytest.raises(ValueError, match="has no eos token to append; pass append_eos=False"):
        load_jsonl(tmp_path / "data.jsonl", tokenizer)
    assert len(load_jsonl(tmp_path / "data.jsonl", tokenizer, append_eos=False)) == 1


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)no tokenizer can be loaded from .*\. Give 'tiny'"):
        load_tokenizer(str(tmp_path))


def test_tiny_is_the_byte_tokenizer():
    assert isinstance(load_tokenizer("tiny"), ByteTokenizer)
