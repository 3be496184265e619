"""Deterministic edits of a Python function: one operator, constant, name, call, line or result changed."""

import ast
import io
import keyword
import tokenize
from collections.abc import Iterator

_COMPARISON = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "+=": "-=", "-=": "+=", "*=": "+="}
_CALL = {
    "abs": "int",
    "all": "any",
    "any": "all",
    "len": "sum",
    "list": "set",
    "lower": "strip",
    "max": "min",
    "min": "max",
    "set": "list",
    "sorted": "list",
    "sum": "max",
    "swapcase": "upper",
    "upper": "strip",
}
_LOGIC = {"and": "or", "or": "and", "True": "False", "False": "True"}


def solution_edits(prompt: str, solution: str, *, num_edits: int) -> list[str]:
    """Up to `num_edits` variants of a solution, each with one small change, all different.

    Kinds of change take turns (comparison, arithmetic, constant, name, logic, call, dropped line, result None), and
    each takes its last place in the solution first, because a late change leaves a long shared start. Every variant
    parses, is not blank, and its syntax tree differs from the solution's.

    Args:
        prompt: source up to the solution; says which names exist.
        solution: the source that follows; only this is changed.
        num_edits: most variants to return.

    Raises:
        SyntaxError: `prompt + solution` is not valid Python.

    Example:
        >>> solution_edits("def f(x, y):\\n", "    return x + y\\n", num_edits=2)
        ['    return x - y\\n', '    return x + x\\n']
    """
    before = ast.dump(ast.parse(prompt + solution))
    offset = len(prompt)
    places = _token_changes(prompt + solution, offset)
    places["line"] = list(_statement_changes(prompt + solution, offset, drop=True))
    places["result"] = list(_statement_changes(prompt + solution, offset, drop=False))
    queues = [sorted(changes, reverse=True) for changes in places.values()]
    edits: list[str] = []
    while any(queues) and len(edits) < num_edits:
        for queue in queues:
            while queue and len(edits) < num_edits:
                start, stop, text = queue.pop(0)
                edit = solution[:start] + text + solution[stop:]
                if edit.strip() and edit not in edits and _is_other_program(prompt + edit, before):
                    edits.append(edit)
                    break
    return edits


def _is_other_program(source: str, before: str) -> bool:
    try:
        return ast.dump(ast.parse(source)) != before
    except SyntaxError:
        return False


def _token_changes(source: str, offset: int) -> dict[str, list[tuple[int, int, str]]]:
    """Changes of single tokens by kind: (start, stop, new text), in characters of the solution."""
    changes: dict[str, list[tuple[int, int, str]]] = {
        kind: [] for kind in ("comparison", "arithmetic", "constant", "name", "logic", "call")
    }
    names = _local_names(source, offset)
    tokens = list(_plain_tokens(source))
    line_start = _line_starts(source)
    for i, token in enumerate(tokens):
        start = line_start[token.start[0] - 1] + token.start[1] - offset
        stop = start + len(token.string)
        if start < 0:
            continue
        if token.type == tokenize.OP and token.string in _COMPARISON:
            changes["comparison"].append((start, stop, _COMPARISON[token.string]))
        elif token.type == tokenize.OP and token.string in _ARITHMETIC:
            changes["arithmetic"].append((start, stop, _ARITHMETIC[token.string]))
        elif token.type == tokenize.NUMBER and token.string.isdecimal():
            changes["constant"].append((start, stop, str(int(token.string) + 1)))
        elif token.type == tokenize.NAME and token.string in _LOGIC:
            changes["logic"].append((start, stop, _LOGIC[token.string]))
        elif token.type == tokenize.NAME and token.string in _CALL and tokens[i + 1].string == "(":
            changes["call"].append((start, stop, _CALL[token.string]))
        elif token.string in names and len(names) > 1 and not _is_attribute_or_keyword(tokens, i):
            other = names[(names.index(token.string) + 1) % len(names)]
            changes["name"].append((start, stop, other))
    return changes


def _is_attribute_or_keyword(tokens: list[tokenize.TokenInfo], i: int) -> bool:
    follows = tokens[i + 1].string if i + 1 < len(tokens) else ""
    return tokens[i - 1].string in (".", "def", "for", "lambda") or follows == "="


def _plain_tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """Tokens outside f-strings: those are one token up to Python 3.11 and several after, and edits must not differ."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if depth == 0 and kind != "FSTRING_END":
            yield token


def _local_names(source: str, offset: int) -> list[str]:
    """Arguments of the last function and names that the solution assigns, sorted."""
    tree = ast.parse(source)
    function = [node for node in tree.body if isinstance(node, ast.FunctionDef)][-1]
    first_line = source.count("\n", 0, offset) + 1
    names = {argument.arg for argument in function.args.args}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno >= first_line:
            names.add(node.id)
    return sorted(name for name in names if not keyword.iskeyword(name))


def _statement_changes(source: str, offset: int, *, drop: bool) -> Iterator[tuple[int, int, str]]:
    """Statements of the solution that fill one whole line, dropped; or its results, each replaced by None."""
    line_start = _line_starts(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.Return | ast.Continue | ast.Break):
            start, stop = line_start[node.lineno - 1], line_start[node.end_lineno or node.lineno]
            line = source[start:stop]
            if start < offset or line.count("\n") != 1:
                continue
            if drop:
                yield start - offset, stop - offset, ""
            elif isinstance(node, ast.Return) and line.lstrip().startswith("return "):
                value = start + line.index("return ") + len("return ")
                yield value - offset, stop - offset, "None\n"


def _line_starts(source: str) -> list[int]:
    """Characters before each line, and one more entry: the length of the source."""
    starts = [0]
    for line in io.StringIO(source):  # like the tokenizer, and unlike str.splitlines, this splits at newlines only
        starts.append(starts[-1] + len(line))
    return starts
