"""JSONL files -> items. A file is loaded whole or not at all, and every error names its line."""

import json
import os
from pathlib import Path
from typing import Any

from deltamesh.data.errors import DataError, FieldError
from deltamesh.data.examples import Item
from deltamesh.data.formats import LineReader
from deltamesh.data.tokenizer import Tokenizer

_BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def load_jsonl(
    path: str | os.PathLike[str], tokenizer: Tokenizer, *, vocab_size: int | None = None, append_eos: bool = True
) -> list[Item]:
    """Load a JSONL file: one item per line that is not blank. Lines of all formats may stand in one file.

    `{"tokens": [...], "targets": [...]}`
        Token ids. Targets stand at the position that predicts them, -100 is ignored; without `targets`, each position
        predicts the next token and the last predicts nothing.
    `{"messages": [{"role": ..., "content": ...}, ...]}`
        A conversation through the tokenizer's chat template. Only what the assistant wrote is learned, the end of its
        turns included; `Tokenizer.render_chat` says which tokens these are.
    `{"prompt": str, "completions": [str | {"text": str, "weight": float} | {"text": str, "advantage": float}, ...]}`
        A group: one example per completion, all with the prompt's tokens before it. Only completion tokens are learned;
        the weight or advantage (default 1) multiplies their log-probabilities. Both can also be given as a list beside
        `completions`. Prompt and completions are encoded apart; bos comes first if the tokenizer uses one.

    Args:
        path: the file, UTF-8.
        tokenizer: see `load_tokenizer`.
        vocab_size: token ids must be below it; default the tokenizer's (give the model's if that is smaller).
        append_eos: whether completions of groups end with the tokenizer's eos token.

    Returns:
        Items in file order, each a tuple of examples to be kept together.

    Raises:
        DataError: the file is empty or a line cannot be used; nothing of the file is returned then.
        OSError: the file cannot be read.
        ValueError: eos is to be appended but the tokenizer has none.

    Example:
        >>> import tempfile
        >>> from deltamesh.data import ByteTokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "data.jsonl")
        ...     _ = path.write_text('{"prompt": "1+1=", "completions": [{"text": "2", "weight": 0.5}]}')
        ...     [(example,)] = load_jsonl(path, ByteTokenizer())
        >>> example.target_tokens.tolist(), example.weights.tolist()
        ([-100, -100, -100, -100, 50, 257, -100], [0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0])
    """
    if append_eos and tokenizer.eos_id is None:
        raise ValueError(f"{type(tokenizer).__name__} has no eos token to append; pass append_eos=False")
    path = Path(path)
    content = path.read_bytes()
    for mark, name in _BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            raise DataError(
                f"the file starts with a {name} byte order mark; save it as UTF-8 without one", path=path, line=1
            )
    reader = LineReader(
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size if vocab_size is None else vocab_size,
        append_eos=append_eos,
    )
    items: list[Item] = []
    for number, raw in enumerate(content.split(b"\n"), start=1):  # only \n ends a line: JSON strings may hold U+2028
        if raw.strip():
            value = _parse(raw, path=path, line=number)
            try:
                items.append(reader.read(value))
            except FieldError as error:
                raise DataError(error.reason, path=path, line=number, field=error.field) from error
    if not items:
        raise DataError("the file is empty: no line holds anything", path=path)
    return items


def _parse(raw: bytes, *, path: Path, line: int) -> object:
    try:
        text = raw.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {error.start + 1} of the line (0x{raw[error.start]:02x}) is not UTF-8; save the file as UTF-8",
            path=path,
            line=line,
        ) from error
    try:
        return json.loads(text, object_pairs_hook=_unique_fields)
    except FieldError as error:
        raise DataError(error.reason, path=path, line=line, field=error.field) from error
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text) or error.msg.startswith("Unterminated string")
        what = "truncated JSON: the line ends before its value does" if cut else "not valid JSON"
        raise DataError(f"{what} ({error.msg} at column {error.pos + 1})", path=path, line=line) from error
    except ValueError as error:  # Python refuses integers of thousands of digits
        raise DataError(f"not valid JSON ({error})", path=path, line=line) from error
    except RecursionError as error:
        raise DataError("the JSON is nested too deeply for any known format", path=path, line=line) from error


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise FieldError(f"the field {name!r} stands twice in one object; keep one")
        fields[name] = value
    return fields
