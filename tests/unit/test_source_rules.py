"""The sources keep the rules that no linter has, and each rule's checker is seen to fail on a planted violation."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit import source_rules as rules

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src/deltamesh").rglob("*.py"))
MODULE_RULES = [
    rules.collective_uses,
    rules.global_rank_uses,
    rules.default_world_uses,
    rules.degree_branches,
    rules.impure_imports,
    rules.swallowed_errors,
    rules.module_state,
]

Rule = Callable[[ast.Module, str], list[str]]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("rule", MODULE_RULES, ids=lambda rule: rule.__name__)
def test_sources_keep_the_rule(rule: Rule) -> None:
    assert len(SOURCES) > 20
    found = [line for path in SOURCES for line in rule(ast.parse(path.read_text()), _name(path))]
    assert not found, "\n".join(found)


def test_no_file_is_longer_than_500_lines() -> None:
    files = [path for folder in ("src", "tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    found = [line for path in files for line in rules.long_file(path.read_text(), _name(path))]
    assert not found, "\n".join(found)


def test_product_has_no_marks_of_unfinished_work() -> None:
    files = [*SOURCES, *ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    files += [
        path
        for kind in ("*.py", "*.md")
        for top in ("docs", "examples", "benchmarks")
        for path in (ROOT / top).rglob(kind)
    ]
    found = [line for path in files for line in rules.forbidden_text(path.read_text(), _name(path))]
    assert not found, "\n".join(found)


COLLECTIVES, MESH = rules.COLLECTIVES_MODULE, rules.MESH_MODULE
OPS, PLAN, TRAIN = (f"src/deltamesh/{name}/planted.py" for name in ("ops", "plan", "train"))


@pytest.mark.parametrize(
    ("rule", "path", "code"),
    [
        (rules.collective_uses, OPS, "import torch.distributed as dist\ndist.all_reduce(x, group=g)"),
        (rules.collective_uses, OPS, "import torch\ntorch.distributed.broadcast(x, group_src=0, group=g)"),
        (rules.collective_uses, OPS, "from torch import distributed\ndistributed.all_to_all_single(a, b, group=g)"),
        (rules.collective_uses, OPS, "from torch.distributed import all_gather_into_tensor as f"),
        (rules.collective_uses, OPS, "from torch.distributed import *"),
        (rules.collective_uses, OPS, "from torch.distributed.distributed_c10d import reduce_scatter_tensor"),
        (rules.collective_uses, OPS, "import torch.distributed._functional_collectives as f\nf.all_gather_tensor(x)"),
        (rules.collective_uses, OPS, "from torch.distributed.nn.functional import all_reduce"),
        (rules.collective_uses, OPS, "def f():\n    import torch.distributed as d\n    return d.P2POp(d.isend, x, 1)"),
        (rules.collective_uses, OPS, "import torch.distributed as d\nrun = d.batch_isend_irecv"),
        (rules.collective_uses, OPS, "import torch.distributed as d\nd.barrier()"),
        (rules.collective_uses, OPS, "import torch.distributed as d\nd.all_gather_object(out, x, group=g)"),
        (rules.collective_uses, OPS, "import torch.distributed as d\nd.broadcast_object_list(x, group=g)"),
        (rules.collective_uses, OPS, "import torch.distributed as d\ngetattr(d, 'all_reduce')(x)"),
        (rules.collective_uses, OPS, "import torch.distributed as d\ngetattr(d, name)(x)"),
        (rules.collective_uses, OPS, "group.handle.allreduce([x])"),
        (rules.collective_uses, MESH, "import torch.distributed as dist\ndist.barrier()"),
        (rules.global_rank_uses, COLLECTIVES, "import torch.distributed as d\nd.broadcast(x, src=0, group=g)"),
        (rules.global_rank_uses, COLLECTIVES, "import torch.distributed as d\nd.broadcast(x, 0, group=g)"),
        (rules.global_rank_uses, COLLECTIVES, "import torch.distributed as d\nd.send(x, dst=1)"),
        (rules.global_rank_uses, TRAIN, "my_exchange(x, src=0)"),
        (rules.global_rank_uses, TRAIN, "import torch.distributed as d\nd.get_global_rank(g, 1)"),
        (rules.default_world_uses, COLLECTIVES, "import torch.distributed as d\nd.all_reduce(x)"),
        (rules.default_world_uses, TRAIN, "import torch.distributed as d\ngroup = d.group.WORLD"),
        (rules.degree_branches, OPS, "if context.cp.size > 1:\n    pass"),
        (rules.degree_branches, OPS, "y = x if tp == 1 else f(x)"),
        (rules.degree_branches, OPS, "while 1 < topology.tp:\n    pass"),
        (rules.degree_branches, "src/deltamesh/models/planted.py", "if tp_size >= 2:\n    pass"),
        (rules.impure_imports, PLAN, "import torch.nn as nn"),
        (rules.impure_imports, PLAN, "def f():\n    from torch import Tensor"),
        (rules.impure_imports, PLAN, "from deltamesh import ops"),
        (rules.impure_imports, "src/deltamesh/tree/planted.py", "from deltamesh.distributed.collectives import Group"),
        (rules.swallowed_errors, TRAIN, "try:\n    f()\nexcept Exception:\n    pass"),
        (rules.swallowed_errors, TRAIN, "for x in y:\n    try:\n        f()\n    except:\n        continue"),
        (rules.module_state, TRAIN, "_CACHE: dict[int, int] = {}"),
        (rules.module_state, TRAIN, "import collections\nSEEN = collections.defaultdict(list)"),
        (rules.module_state, TRAIN, "def f():\n    global g"),
    ],
)  # fmt: skip
def test_planted_violation_is_seen(rule: Rule, path: str, code: str) -> None:
    assert rule(ast.parse(code), path)


@pytest.mark.parametrize(
    ("rule", "path", "code"),
    [
        (rules.collective_uses, COLLECTIVES, "import torch.distributed as d\nd.all_reduce(x, group=g)"),
        (rules.collective_uses, OPS, "from deltamesh.distributed.collectives import all_reduce\nall_reduce(x, g)"),
        (rules.collective_uses, OPS, "y = torch.gather(x, 0, index).scatter(0, index, z)"),
        (rules.collective_uses, TRAIN, "import torch.distributed as d\nd.init_process_group('gloo')\nd.get_rank()"),
        (rules.global_rank_uses, COLLECTIVES, "import torch.distributed as d\nd.send(x, group_dst=1, group=g)"),
        (rules.default_world_uses, COLLECTIVES, "import torch.distributed as d\nd.all_reduce(x, group=g)"),
        (rules.degree_branches, OPS, "if heads % tp == 0 and rows > 1:\n    pass"),
        (rules.degree_branches, TRAIN, "if topology.tp > 1:\n    pass"),
        (rules.impure_imports, PLAN, "import numpy as np\nfrom deltamesh.tree import PrefixTree"),
        (rules.impure_imports, OPS, "import torch"),
        (rules.swallowed_errors, TRAIN, "try:\n    f()\nexcept KeyError:\n    pass"),
        (rules.module_state, TRAIN, "NAMES = {'a': 1}\n__all__ = ['f']"),
    ],
)  # fmt: skip
def test_code_that_keeps_the_rule_is_let_through(rule: Rule, path: str, code: str) -> None:
    assert not rule(ast.parse(code), path)


def test_planted_text_and_length_are_seen() -> None:
    assert rules.long_file("x\n" * 501, "f.py")
    assert not rules.long_file("x\n" * 500, "f.py")
    assert rules.forbidden_text("x = 1  # TO" + "DO: more", "f.py") == ["f.py:1: TO" + "DO"]
    assert rules.forbidden_text("\nraise NotImplemented" + "Error", "f.py")
    assert rules.forbidden_text("see /wo" + "rk/notes", "f.md")
    assert not rules.forbidden_text("rows / work/ rank, a todo list", "f.md")
