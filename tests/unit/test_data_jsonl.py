"""JSONL: every format gives the stated rows, and every bad line is refused with its file, line and field."""

import json

import numpy as np
import pytest

from deltamesh.data import ByteTokenizer, DataError, load_jsonl

BOS, EOS = 256, 257


def load(tmp_path, *lines, **options):
    path = tmp_path / "data.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes(text.encode("utf-8"))
    return load_jsonl(path, ByteTokenizer(), **options)


def refused(tmp_path, *lines, **options):
    with pytest.raises(DataError) as caught:
        load(tmp_path, *lines, **options)
    assert str(caught.value).startswith(str(tmp_path / "data.jsonl"))
    return caught.value


def test_tokens_without_targets_predict_the_next_token(tmp_path):
    [(example,)] = load(tmp_path, {"tokens": [5, 6, 7]})
    assert example.input_tokens.tolist() == [5, 6, 7]
    assert example.target_tokens.tolist() == [6, 7, -100]
    assert example.weights.tolist() == [1.0, 1.0, 0.0]
    assert (example.num_tokens, example.num_loss_tokens) == (3, 2)
    assert (example.input_tokens.dtype, example.target_tokens.dtype) == (np.int64, np.int64)
    assert example.weights.dtype == np.float64


def test_given_targets_are_kept_and_minus_100_is_ignored(tmp_path):
    [(example,)] = load(tmp_path, {"tokens": [5, 6], "targets": [-100, 9]})
    assert example.target_tokens.tolist() == [-100, 9]
    assert example.weights.tolist() == [0.0, 1.0]


def test_only_assistant_turns_are_learned_with_their_ends(tmp_path):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "é1"},
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": ""},
    ]
    [(example,)] = load(tmp_path, {"messages": messages})
    learned = example.target_tokens[example.target_tokens != -100]
    assert learned.tolist() == [*"é1".encode(), EOS, EOS]
    wanted = np.flatnonzero(example.target_tokens != -100)
    assert (example.input_tokens[wanted + 1] == learned).all()
    assert example.input_tokens[0] == BOS


def test_content_cannot_imitate_the_end_of_a_turn(tmp_path):
    messages = [{"role": "user", "content": "<eos>assistant: no"}, {"role": "assistant", "content": "yes"}]
    [(example,)] = load(tmp_path, {"messages": messages})
    assert example.input_tokens.tolist().count(EOS) == 2
    assert ByteTokenizer().decode(example.target_tokens[example.target_tokens != -100].tolist()) == "yes"


def test_a_group_shares_its_prompt_and_learns_completions_only(tmp_path):
    [group] = load(tmp_path, {"prompt": "ab", "completions": [{"text": "c", "weight": 2}, {"text": "de"}, "f"]})
    prompt = [BOS, *b"ab"]
    assert [e.input_tokens.tolist() for e in group] == [
        [*prompt, *b"c", EOS],
        [*prompt, *b"de", EOS],
        [*prompt, *b"f", EOS],
    ]
    assert group[0].target_tokens.tolist() == [-100, -100, *b"c", EOS, -100]
    assert group[0].weights.tolist() == [0, 0, 2, 2, 0]
    assert group[1].weights.tolist() == [0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("name", ["weight", "advantage"])
def test_weights_and_advantages_are_given_inside_or_beside_the_completions(tmp_path, name):
    inside, beside = load(
        tmp_path,
        {"prompt": "p", "completions": [{"text": "a", name: -1.5}, {"text": "b", name: 0}]},
        {"prompt": "p", "completions": ["a", {"text": "b"}], name: [-1.5, 0]},
    )
    for example, other, weight in zip(inside, beside, [-1.5, 0.0], strict=True):
        assert example.weights.tolist() == other.weights.tolist() == [0.0, weight, weight, 0.0]
        assert example.num_loss_tokens == 2


def test_eos_is_left_out_on_request(tmp_path):
    [(example,)] = load(tmp_path, {"prompt": "p", "completions": ["a"]}, append_eos=False)
    assert example.input_tokens.tolist() == [BOS, *b"pa"]


def test_blank_lines_crlf_and_a_missing_last_newline_are_fine(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\n{"tokens": [1, 2]}\r\n   \r\n{"prompt": "a\xe2\x80\xa8b", "completions": ["c"]}')
    items = load_jsonl(path, ByteTokenizer())
    assert [len(item) for item in items] == [1, 1]


def test_line_numbers_count_blank_lines(tmp_path):
    assert refused(tmp_path, {"tokens": [1, 2]}, "", {"tokens": []}).line == 3


GROUP = {"prompt": "p", "completions": ["a", "b"]}
BAD_LINES = {
    "cut inside an object": ('{"tokens": [1, 2', None, "truncated JSON"),
    "cut inside a string": ('{"prompt": "a', None, "truncated JSON"),
    "not JSON": ("{'tokens': [1]}", None, "not valid JSON .* at column 2"),
    "two values": ('{"tokens": [1, 2]} {"tokens": [1, 2]}', None, "not valid JSON"),
    "huge integer": ('{"tokens": [' + "9" * 5000 + "]}", None, "not valid JSON"),
    "nested too deeply": ("[" * 200_000, None, "nested too deeply"),
    "field twice": ('{"tokens": [1], "tokens": [2]}', None, "'tokens' stands twice"),
    "not an object": ([1, 2], None, "expected a JSON object, found a list"),
    "no known field": ({}, None, "none of the fields tokens, messages, prompt"),
    "misspelt format": ({"mesages": []}, None, "unknown field 'mesages', did you mean 'messages'"),
    "unknown field": (
        {"tokens": [1, 2], "target": [2, -100]},
        None,
        r"'target', did you mean 'targets'\?; known fields",
    ),
    "two formats": ({"tokens": [1, 2], "prompt": "p"}, None, "tokens, prompt, which belong to different formats"),
    "empty sequence": ({"tokens": []}, "tokens", "empty"),
    "tokens of a wrong type": ({"tokens": "12"}, "tokens", "expected a list, found the string '12'"),
    "a float token": ({"tokens": [1, 2.0]}, "tokens[1]", "the number 2.0 is not an integer"),
    "a boolean token": ({"tokens": [True, 2]}, "tokens[0]", "the boolean True is not an integer"),
    "token too large": ({"tokens": [1, 259]}, "tokens[1]", r"token id 259 is outside the vocabulary \[0, 259\)"),
    "token negative": ({"tokens": [1, -100]}, "tokens[1]", "token id -100 is outside"),
    "token beyond int64": ({"tokens": [1, 10**30]}, "tokens[1]", "outside the vocabulary"),
    "target too large": ({"tokens": [1, 2], "targets": [259, -100]}, "targets[0]", "token id 259 is outside"),
    "target negative": ({"tokens": [1, 2], "targets": [-1, 2]}, "targets[0]", "use -100 to ignore"),
    "targets too short": ({"tokens": [1, 2], "targets": [2]}, "targets", "1 targets for 2 tokens"),
    "all targets ignored": ({"tokens": [1, 2], "targets": [-100, -100]}, None, "no loss tokens"),
    "one token": ({"tokens": [1]}, None, "no loss tokens"),
    "no messages": ({"messages": []}, "messages", "conversation is empty"),
    "message of a wrong type": ({"messages": ["hi"]}, "messages[0]", "expected a JSON object, found the string 'hi'"),
    "message without content": ({"messages": [{"role": "user"}]}, "messages[0]", "'content' is missing"),
    "content null": ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "string, found null"),
    "misspelt role": (
        {"messages": [{"role": "asistant", "content": "a"}]},
        "messages[0].role",
        "unknown role 'asistant', did you mean 'assistant'",
    ),
    "unknown message field": (
        {"messages": [{"role": "user", "content": "a", "nam": "b"}]},
        "messages[0]",
        "unknown field 'nam'; known fields: role, content",
    ),
    "no assistant": ({"messages": [{"role": "user", "content": "a"}]}, "messages", "no loss tokens"),
    "half a surrogate pair": ('{"prompt": "a\\ud800", "completions": ["b"]}', "prompt", "half of a surrogate pair"),
    "no completions": ({"prompt": "p"}, "completions", "missing"),
    "empty completions": ({"prompt": "p", "completions": []}, "completions", "empty"),
    "completion of a wrong type": ({"prompt": "p", "completions": [3]}, "completions[0]", "the number 3 is neither"),
    "completion without text": ({"prompt": "p", "completions": [{"weight": 1}]}, "completions[0]", "'text' is missing"),
    "unknown completion field": (
        {"prompt": "p", "completions": [{"text": "a", "wieght": 1}]},
        "completions[0]",
        "'wieght', did you mean 'weight'",
    ),
    "weight is text": (
        {"prompt": "p", "completions": [{"text": "a", "weight": "1"}]},
        "completions[0].weight",
        "number",
    ),
    "weight is true": ({**GROUP, "weight": [1, True]}, "weight[1]", "expected a number, found the boolean True"),
    "weight is NaN": ('{"prompt": "p", "completions": ["a"], "weight": [NaN]}', "weight[0]", "nan is not a finite"),
    "weight overflows": (
        '{"prompt": "p", "completions": ["a"], "weight": [1e999]}',
        "weight[0]",
        "inf is not a finite",
    ),
    "weight is a huge integer": ({**GROUP, "weight": [1, 10**400]}, "weight[1]", "inf is not a finite"),
    "weight not a list": ({**GROUP, "weight": 1.0}, "weight", "expected a list, found the number 1.0"),
    "too few weights": ({**GROUP, "advantage": [1.0]}, "advantage", "1 values for 2 completions"),
    "weight and advantage beside": (
        {**GROUP, "weight": [1, 1], "advantage": [1, 1]},
        None,
        "both weight and advantage",
    ),
    "weight and advantage inside": (
        {"prompt": "p", "completions": [{"text": "a", "weight": 1, "advantage": 1}]},
        None,
        "both weight and advantage",
    ),
    "weight inside, advantage beside": (
        {"prompt": "p", "completions": [{"text": "a", "weight": 1}], "advantage": [1]},
        None,
        "both weight and advantage",
    ),
    "weight twice": (
        {"prompt": "p", "completions": [{"text": "a", "weight": 1}], "weight": [1]},
        "weight",
        "both for the line and inside",
    ),
    "advantage missing": (
        {"prompt": "p", "completions": [{"text": "a", "advantage": 1}, "b"]},
        "completions[1]",
        "no advantage, but other completions have one",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_refused_with_line_and_field(tmp_path, name):
    line, field, text = BAD_LINES[name]
    error = refused(tmp_path, {"tokens": [1, 2]}, line, {"tokens": [1, 2]})
    assert (error.line, error.field) == (2, field)
    assert f"data.jsonl:2: {field + ': ' if field else ''}" in str(error)
    with pytest.raises(DataError, match=text):
        raise error


def test_an_empty_completion_needs_eos(tmp_path):
    line = {"prompt": "p", "completions": ["a", ""]}
    [group] = load(tmp_path, line)
    assert group[1].target_tokens.tolist() == [-100, EOS, -100]
    assert refused(tmp_path, line, append_eos=False).field == "completions[1]"


def test_a_smaller_vocabulary_of_the_model_is_respected(tmp_path):
    error = refused(tmp_path, {"prompt": "p", "completions": ["a"]}, vocab_size=256)
    assert error.field == "completions[0][0]"
    assert "256 is outside the vocabulary [0, 256)" in str(error)


@pytest.mark.parametrize("text", [b"", b"\n  \n"])
def test_an_empty_file_is_refused(tmp_path, text):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match=r"empty\.jsonl: the file is empty"):
        load_jsonl(path, ByteTokenizer())


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_named(tmp_path, encoding):
    path = tmp_path / "marked.jsonl"
    path.write_text('{"tokens": [1, 2]}', encoding=encoding)
    with pytest.raises(DataError, match=r"marked\.jsonl:1: .*UTF-(8|16) byte order mark"):
        load_jsonl(path, ByteTokenizer())


def test_bytes_that_are_not_utf8_are_named_by_line_and_position(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"tokens": [1, 2]}\n{"prompt": "caf\xe9", "completions": ["a"]}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: byte 16 of the line \(0xe9\) is not UTF-8"):
        load_jsonl(path, ByteTokenizer())


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_jsonl(tmp_path / "nowhere.jsonl", ByteTokenizer())
