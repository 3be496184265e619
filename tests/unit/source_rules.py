"""Checkers for the rules that no linter has. Each takes a parsed module and returns what breaks the rule, by line."""

import ast
import re
from collections.abc import Iterator

COLLECTIVE = re.compile(
    r"(all_gather|all_reduce|all_to_all|reduce_scatter|broadcast|scatter|gather|reduce|barrier|monitored_barrier"
    r"|send|recv|isend|irecv|batch_isend_irecv|P2POp)(_.*)?$|.*_object(_list)?$"
)
# Methods of a ProcessGroup do the same without torch.distributed's name.
GROUP_METHODS = {
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "recv_anysource", "reduce_scatter_tensor_coalesced", "_allgather_base",
    "_reduce_scatter_base",
}  # fmt: skip
GLOBAL_RANK_KEYWORDS = {"src", "dst"}
GLOBAL_RANK_FUNCTIONS = {"get_global_rank", "get_group_rank"}
PEER_SECOND = re.compile(r"(broadcast|scatter|gather|reduce|send|recv|isend|irecv)(_object_list|_object)?$")
COLLECTIVES_MODULE = "src/deltamesh/distributed/collectives.py"
MESH_MODULE = "src/deltamesh/distributed/mesh.py"
DEGREE = re.compile(r"(^|[._])(dp|cp|tp|dp_cp|cp_tp)(_size|\.size)?$")
FORBIDDEN_TEXT = re.compile(r"\b(TODO|FIXME|XXX)\b|(?<![\w./])/work/|NotImplementedError")
MAX_LINES = 500


def collective_uses(tree: ast.Module, path: str) -> list[str]:
    """References to torch's collectives, however imported, outside the one module that may have them."""
    if path == COLLECTIVES_MODULE:
        return []
    found = []
    for node, name in _torch_distributed_names(tree):
        if COLLECTIVE.match(name.rsplit(".", 1)[-1]) or name.endswith(".*"):
            found.append(f"{path}:{node.lineno}: {name}; call it through deltamesh.distributed.collectives")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GROUP_METHODS:
            found.append(f"{path}:{node.lineno}: .{node.func.attr}() of a process group")
    return found


def global_rank_uses(tree: ast.Module, path: str) -> list[str]:
    """Peers addressed by global rank: `src=`, `dst=`, a positional peer, or a translation between global and local."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in GLOBAL_RANK_KEYWORDS:
                    found.append(f"{path}:{node.lineno}: {keyword.arg}= is a global rank; use group_{keyword.arg}=")
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _resolve(node.func, aliases)).startswith("torch.distributed."):
            function = name.rsplit(".", 1)[-1]
            if PEER_SECOND.match(function) and len(node.args) > 1:
                found.append(f"{path}:{node.lineno}: second argument of {function} may be a global rank; use keywords")
    for node, name in _torch_distributed_names(tree):
        if name.rsplit(".", 1)[-1] in GLOBAL_RANK_FUNCTIONS:
            found.append(f"{path}:{node.lineno}: {name} translates global ranks; address peers inside their group")
    return found


def default_world_uses(tree: ast.Module, path: str) -> list[str]:
    """Collectives without a group (torch then takes the world), and the world group outside the mesh's module."""
    found = []
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _resolve(node.func, aliases)
            if name.startswith("torch.distributed.") and COLLECTIVE.match(name.rsplit(".", 1)[-1]):
                given = {keyword.arg for keyword in node.keywords}
                if "group" not in given and None not in given:
                    found.append(f"{path}:{node.lineno}: {name} without group= runs on the world")
        elif isinstance(node, ast.Attribute) and node.attr == "WORLD" and path != MESH_MODULE:
            found.append(f"{path}:{node.lineno}: WORLD; use the mesh's groups")
    return found


def degree_branches(tree: ast.Module, path: str) -> list[str]:
    """Comparisons of an axis's degree with 1 in models and ops, where degree 1 takes the path of degree n."""
    if not path.startswith(("src/deltamesh/models/", "src/deltamesh/ops/")):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.comparators) == 1:
            sides = (node.left, node.comparators[0])
            for side, other in (sides, sides[::-1]):
                if isinstance(other, ast.Constant) and other.value in (1, 2) and DEGREE.search(ast.unparse(side)):
                    found.append(f"{path}:{node.lineno}: {ast.unparse(node)}; degree 1 takes the same path")
    return found


def impure_imports(tree: ast.Module, path: str) -> list[str]:
    """Imports of torch, or of a part of the package that has it, in trees and plans."""
    if not path.startswith(("src/deltamesh/tree/", "src/deltamesh/plan/")):
        return []
    allowed = ("deltamesh.tree", "deltamesh.plan", "deltamesh.data")
    found = []
    for node in ast.walk(tree):
        for name in _imported(node):
            impure = name.split(".")[0] in ("torch", "transformers", "peft", "fla", "triton")
            if impure or (name.split(".")[0] == "deltamesh" and not name.startswith(allowed)):
                found.append(f"{path}:{node.lineno}: import of {name}; trees and plans are numpy alone")  # type: ignore[attr-defined]
    return found


def swallowed_errors(tree: ast.Module, path: str) -> list[str]:
    """Handlers of every exception that do nothing."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            if broad and all(_does_nothing(line) for line in node.body):
                found.append(f"{path}:{node.lineno}: every error is swallowed")
    return found


def module_state(tree: ast.Module, path: str) -> list[str]:
    """Module-level containers that start empty (registries, caches) and `global` statements."""
    found = [f"{path}:{n.lineno}: global {', '.join(n.names)}" for n in ast.walk(tree) if isinstance(n, ast.Global)]
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        empty = value is not None and ast.unparse(value) in ("[]", "{}")
        made = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in (
            "dict", "list", "set", "defaultdict", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary", "deque",
        )  # fmt: skip
        if empty or made:
            found.append(f"{path}:{node.lineno}: {ast.unparse(node)} is state of the module; pass it in")
    return found


def long_file(text: str, path: str) -> list[str]:
    """A file of more than 500 lines."""
    lines = text.count("\n")
    return [f"{path}: {lines} lines, more than {MAX_LINES}; split it by subject"] if lines > MAX_LINES else []


def forbidden_text(text: str, path: str) -> list[str]:
    """Marks of unfinished work and paths of a workplace."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := FORBIDDEN_TEXT.search(line):
            found.append(f"{path}:{number}: {match.group()}")
    return found


def _does_nothing(line: ast.stmt) -> bool:
    constant = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)  # a docstring or an ellipsis
    return constant or isinstance(line, ast.Pass | ast.Continue)


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local names, and the dotted names they were imported as."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                aliases[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
    return aliases


def _resolve(node: ast.AST, aliases: dict[str, str]) -> str:
    """The dotted name that an expression refers to, or an empty string."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute) and (base := _resolve(node.value, aliases)):
        return f"{base}.{node.attr}"
    return ""


def _torch_distributed_names(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Every reference to something of torch.distributed: imports, attributes, and getattr with a constant."""
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            for name in node.names:
                yield node, f"{node.module}.{name.name}"
        elif isinstance(node, ast.Attribute):
            if (name_ := _resolve(node, aliases)).startswith("torch.distributed."):
                yield node, name_
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            base = _resolve(node.args[0], aliases)
            if base.startswith("torch.distributed"):
                constant = isinstance(node.args[1], ast.Constant)
                yield node, f"{base}.{node.args[1].value if constant else '*'}"  # type: ignore[attr-defined]


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{name.name}" if node.module == "deltamesh" else node.module for name in node.names]
    return []
