"""One line of a data file -> one item, in any of three formats.

{"tokens": [...], "targets": [...]}                            token ids as they are
{"messages": [{"role": "user", "content": "..."}, ...]}        a conversation; learns the assistant's turns
{"prompt": "...", "completions": ["...", ...]}                 a group; learns the completions
"""

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltamesh.data.errors import FieldError
from deltamesh.data.examples import IGNORE_INDEX, Example, Ints, Item, example_from_mask, example_from_targets
from deltamesh.data.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {
    "tokens": ("tokens", "targets"),
    "messages": ("messages",),
    "prompt": ("prompt", "completions", "weight", "advantage"),
}


@dataclass(frozen=True, kw_only=True)
class LineReader:
    """Turns the JSON value of a line into an item.

    Attributes:
        tokenizer: encodes texts and renders chats.
        vocab_size: token ids must be in [0, vocab_size).
        append_eos: whether completions end with the tokenizer's eos token.
    """

    tokenizer: Tokenizer
    vocab_size: int
    append_eos: bool

    def read(self, value: object) -> Item:
        """The item of a line.

        Raises:
            FieldError: the line cannot be used; says which field and why.
        """
        line = _object(value, field=None)
        present = [name for name in _FIELDS if name in line]
        if not present:
            every = [name for names in _FIELDS.values() for name in names]
            _refuse_unknown(line, every, field=None)
            raise FieldError(f"the line has none of the fields {_listed(_FIELDS)}, so its format is unknown")
        if len(present) > 1:
            raise FieldError(f"the line has the fields {_listed(present)}, which belong to different formats; keep one")
        _refuse_unknown(line, _FIELDS[present[0]], field=None)
        readers: dict[str, Callable[[Mapping[str, Any]], Item]] = {
            "tokens": self._read_tokens,
            "messages": self._read_messages,
            "prompt": self._read_group,
        }
        item = readers[present[0]](line)
        if not any(example.num_loss_tokens for example in item):
            raise FieldError(
                "the line has no loss tokens: every target is ignored, so nothing would be learned from it"
            )
        return item

    def _read_tokens(self, line: Mapping[str, Any]) -> Item:
        tokens = self._ids(line["tokens"], field="tokens", ignored=False)
        if len(tokens) == 0:
            raise FieldError("the sequence is empty; give at least one token", field="tokens")
        if "targets" not in line:
            return (example_from_mask(tokens, np.ones(len(tokens), dtype=np.bool_)),)
        targets = self._ids(line["targets"], field="targets", ignored=True)
        if len(targets) != len(tokens):
            raise FieldError(
                f"{len(targets)} targets for {len(tokens)} tokens; give one target per token, -100 where there is none",
                field="targets",
            )
        return (example_from_targets(tokens, targets),)

    def _read_messages(self, line: Mapping[str, Any]) -> Item:
        given = _list(line["messages"], field="messages")
        if not given:
            raise FieldError("the conversation is empty; give at least one message", field="messages")
        messages = []
        for i, value in enumerate(given):
            field = f"messages[{i}]"
            message = _object(value, field=field)
            _refuse_unknown(message, ("role", "content"), field=field)
            for name in ("role", "content"):
                if name not in message:
                    raise FieldError(f"{name!r} is missing; a message has 'role' and 'content'", field=field)
            role = _text(message["role"], field=f"{field}.role")
            if role not in ROLES:
                raise FieldError(f"unknown role {role!r}{_closest(role, ROLES)}", field=f"{field}.role")
            messages.append({"role": role, "content": _text(message["content"], field=f"{field}.content")})
        if all(message["role"] != "assistant" for message in messages):
            raise FieldError("no message has role 'assistant', so there are no loss tokens", field="messages")
        try:
            chat = self.tokenizer.render_chat(messages)
        except ValueError as error:
            raise FieldError(str(error), field="messages") from error
        tokens = self._ids(list(chat.tokens), field="messages", ignored=False)
        return (example_from_mask(tokens, np.asarray(chat.learned, dtype=np.bool_)),)

    def _read_group(self, line: Mapping[str, Any]) -> Item:
        if "completions" not in line:
            raise FieldError("the field is missing; a line with 'prompt' needs 'completions'", field="completions")
        bos = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        # Prompt and completion are encoded apart, so that all completions share the prompt's tokens.
        prompt = bos + self.tokenizer.encode(_text(line["prompt"], field="prompt"))
        if not prompt:
            raise FieldError(
                "the prompt is empty and this tokenizer has no bos token, so nothing predicts the first token",
                field="prompt",
            )
        completions = _list(line["completions"], field="completions")
        if not completions:
            raise FieldError("the list is empty; give at least one completion", field="completions")
        texts, own = _read_completions(completions)
        weights = _group_weights(line, own)
        return tuple(
            self._completion(prompt, text, weight, field=f"completions[{i}]")
            for i, (text, weight) in enumerate(zip(texts, weights, strict=True))
        )

    def _completion(self, prompt: list[int], text: str, weight: float, *, field: str) -> Example:
        end = [self.tokenizer.eos_id] if self.append_eos and self.tokenizer.eos_id is not None else []
        completion = self.tokenizer.encode(text) + end
        if not completion:
            raise FieldError("the completion is empty; give at least one token, or append eos", field=field)
        tokens = self._ids(prompt + completion, field=field, ignored=False)
        learned = np.arange(len(tokens)) >= len(prompt)
        return example_from_mask(tokens, learned, weight=weight)

    def _ids(self, value: object, *, field: str, ignored: bool) -> Ints:
        ids = _list(value, field=field)
        for i, token in enumerate(ids):
            if type(token) is not int:  # bool is a subclass of int, and true is not a token
                raise FieldError(f"{_shown(token)} is not an integer token id", field=f"{field}[{i}]")
            if not 0 <= token < self.vocab_size and not (ignored and token == IGNORE_INDEX):
                hint = "; use -100 to ignore a target" if ignored and token < 0 else ""
                raise FieldError(
                    f"token id {token} is outside the vocabulary [0, {self.vocab_size}){hint}", field=f"{field}[{i}]"
                )
        return np.array(ids, dtype=np.int64)


def _read_completions(completions: list[Any]) -> tuple[list[str], list[dict[str, float]]]:
    """Texts, and the weight or advantage that each completion carries itself."""
    texts: list[str] = []
    own: list[dict[str, float]] = []
    for i, value in enumerate(completions):
        field = f"completions[{i}]"
        if isinstance(value, str):
            texts.append(_text(value, field=field))
            own.append({})
            continue
        if not isinstance(value, dict):
            raise FieldError(f"{_shown(value)} is neither a string nor an object with 'text'", field=field)
        _refuse_unknown(value, ("text", "weight", "advantage"), field=field)
        if "text" not in value:
            raise FieldError("'text' is missing", field=field)
        texts.append(_text(value["text"], field=f"{field}.text"))
        own.append({k: _number(value[k], field=f"{field}.{k}") for k in ("weight", "advantage") if k in value})
    return texts, own


def _group_weights(line: Mapping[str, Any], own: list[dict[str, float]]) -> list[float]:
    """The factor of each completion's log-probability, from wherever the line says it."""
    used = sorted({name for names in own for name in names} | {n for n in ("weight", "advantage") if n in line})
    if len(used) > 1:
        raise FieldError("the line has both weight and advantage; each multiplies the log-probability, so give one")
    if not used:
        return [1.0] * len(own)
    name = used[0]
    if name not in line:
        if name == "advantage":
            for i, values in enumerate(own):
                if not values:
                    raise FieldError(
                        "no advantage, but other completions have one; give all", field=f"completions[{i}]"
                    )
        return [values.get(name, 1.0) for values in own]
    if any(own):
        raise FieldError("given both for the line and inside completions; give one of them", field=name)
    numbers = [_number(value, field=f"{name}[{i}]") for i, value in enumerate(_list(line[name], field=name))]
    if len(numbers) != len(own):
        raise FieldError(f"{len(numbers)} values for {len(own)} completions; give one for each", field=name)
    return numbers


def _object(value: object, *, field: str | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(f"expected a JSON object, found {_shown(value)}", field=field)
    return value


def _list(value: object, *, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise FieldError(f"expected a list, found {_shown(value)}", field=field)
    return value


def _text(value: object, *, field: str) -> str:
    if not isinstance(value, str):
        raise FieldError(f"expected a string, found {_shown(value)}", field=field)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FieldError(
            f"character {error.start} is half of a surrogate pair ({value[error.start]!a}), which is not valid text",
            field=field,
        ) from error
    return value


def _number(value: object, *, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(f"expected a number, found {_shown(value)}", field=field)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FieldError(f"{number} is not a finite number", field=field)
    return number


def _refuse_unknown(given: Mapping[str, Any], known: Collection[str], *, field: str | None) -> None:
    for name in given:
        if name not in known:
            raise FieldError(
                f"unknown field {name!r}{_closest(name, known)}; known fields: {_listed(known)}", field=field
            )


def _closest(name: str, known: Collection[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {matches[0]!r}?" if matches else f" (none of {_listed(known)})" if known is ROLES else ""


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)


def _shown(value: object) -> str:
    """A JSON value as its kind and a short excerpt."""
    kinds = {dict: "an object", list: "a list", str: "the string", bool: "the boolean", type(None): "null"}
    kind = kinds.get(type(value), "the number")
    if value is None or isinstance(value, dict | list):
        return kind
    text = repr(value)
    return f"{kind} {text if len(text) <= 40 else text[:37] + '...'}"
