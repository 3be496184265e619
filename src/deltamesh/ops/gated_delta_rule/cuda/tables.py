"""Jobs (walks.py) as the kernels of state_pass.py read them: int32 tables on the device, made once per micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltamesh.ops.gated_delta_rule.cuda.walks import Jobs
from deltamesh.plan.pieces import Ints

_FORWARD_FIELDS = 5  # first row, end row, first chunk, source, target
_BACKWARD_FIELDS = 5  # held, first and end of the gradients to add, target, whether to write


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardTables:
    """Jobs as the forward kernel reads them, on the device.

    Attributes:
        ranges: int32 [jobs, 2], first and end visit of each job, wave by wave.
        visits: int32 [visits, 5].
        waves: first job and number of jobs of each wave.
        num_states: states in memory.
    """

    ranges: Tensor
    visits: Tensor
    waves: tuple[tuple[int, int], ...]
    num_states: int

    @staticmethod
    def build(jobs: Jobs, *, start: Ints, length: Ints, chunk: Ints, device: torch.device) -> "ForwardTables":
        """Tables of jobs over pieces with these first rows, lengths and first chunks."""
        rows = [
            (start[v.piece], start[v.piece] + length[v.piece], chunk[v.piece], v.source, jobs.saved.get(v.piece, -1))
            for v in jobs.visits()
        ]
        ranges, waves = _ranges(jobs)
        return ForwardTables(
            ranges=_table(ranges, 2, device),
            visits=_table(rows, _FORWARD_FIELDS, device),
            waves=waves,
            num_states=jobs.num_states,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardTables:
    """What the backward kernel needs besides `ForwardTables` of the same jobs.

    Attributes:
        visits: int32 [visits, 5].
        added: int32 [n], numbers of gradients in memory.
    """

    visits: Tensor
    added: Tensor

    @staticmethod
    def build(
        jobs: Jobs,
        *,
        added: dict[int, list[int]],
        targets: dict[int, int],
        written: Sequence[bool],
        device: torch.device,
    ) -> "BackwardTables":
        """Tables of jobs.

        Args:
            jobs: as in `ForwardTables.build`.
            added: piece -> gradients in memory that are added where it ends.
            targets: piece -> where the gradient of the state it starts from is put in memory.
            written: per piece, whether the gradients of its chunks are stored.
            device: of the tables.
        """
        rows: list[tuple[int, ...]] = []
        flat: list[int] = []
        for v in jobs.visits():
            first = len(flat)
            flat.extend(added.get(v.piece, ()))
            rows.append((v.kept, first, len(flat), targets.get(v.piece, -1), written[v.piece]))
        return BackwardTables(
            visits=_table(rows, _BACKWARD_FIELDS, device), added=torch.tensor(flat, dtype=torch.int32, device=device)
        )


def _ranges(jobs: Jobs) -> tuple[list[tuple[int, int]], tuple[tuple[int, int], ...]]:
    ranges: list[tuple[int, int]] = []
    waves: list[tuple[int, int]] = []
    visit = 0
    for wave in jobs.waves:
        waves.append((len(ranges), len(wave)))
        for job in wave:
            ranges.append((visit, visit + len(job)))
            visit += len(job)
    return ranges, tuple(waves)


def _table(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.int32).reshape(-1, width)).to(device)
