"""Which engine runs a slice. Every backend has the same phases, so one autograd function and any carrier drive all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deltamesh.ops.gated_delta_rule.backward import SliceBackward
from deltamesh.ops.gated_delta_rule.carrier import ExchangeCarrier
from deltamesh.ops.gated_delta_rule.context import ScanContext
from deltamesh.ops.gated_delta_rule.engine import Kept, SliceEngine


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The classes of a backend, which take the same arguments as `Kept`, `SliceEngine` and `SliceBackward`.

    Attributes:
        schedule: of the slice, as the backend's engine takes it.
        shares_workspace: whether an engine takes the `workspace` of another one.
    """

    schedule: Any
    kept: type[Any]
    engine: type[Any]
    backward: type[Any]
    shares_workspace: bool

    def engines(self, parts: Sequence[dict[str, Tensor]], kept: Sequence[Any], **settings: Any) -> list[Any]:
        """An engine for each block of heads, given its q, k, v, g, beta and what is kept of it.

        Blocks never work at the same time, so they share what the backend calls its workspace.
        """
        shared: dict[str, Any] = {}
        engines = []
        for part, k in zip(parts, kept, strict=True):
            engines.append(self.engine(self.schedule, **part, kept=k, **settings, **shared))
            shared = {"workspace": engines[0].workspace} if self.shares_workspace else {}
        return engines

    @staticmethod
    def of(backend: str, context: ScanContext) -> "Phases":
        """Those of "torch" or "fla".

        Raises:
            ImportError: flash-linear-attention is missing or of another version.
        """
        if backend == "fla":
            if not isinstance(context.carrier, ExchangeCarrier):
                raise ValueError(
                    f"{type(context.carrier).__name__} does not drive the kernels of backend='fla'; "
                    "plan with carrier='scan'"
                )
            # imported here: it loads Triton and the library, which the other backends do without
            from deltamesh.ops.gated_delta_rule.cuda.engine import FlaKept, FlaSliceBackward, FlaSliceEngine

            return Phases(
                schedule=context.fla_schedule,
                kept=FlaKept,
                engine=FlaSliceEngine,
                backward=FlaSliceBackward,
                shares_workspace=False,
            )
        return Phases(
            schedule=context.schedule, kept=Kept, engine=SliceEngine, backward=SliceBackward, shares_workspace=True
        )
