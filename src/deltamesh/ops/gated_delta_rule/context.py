"""What the scan needs to know about its slice, made once per micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from deltamesh.distributed.collectives import Group
from deltamesh.ops.gated_delta_rule.carrier import Carrier, LocalCarrier
from deltamesh.ops.gated_delta_rule.pipeline_carrier import PipelineCarrier
from deltamesh.ops.gated_delta_rule.scan_carrier import ScanCarrier
from deltamesh.ops.gated_delta_rule.schedule import Schedule
from deltamesh.plan.carrier import CarrierName, StateLinks
from deltamesh.plan.pieces import Pieces
from deltamesh.plan.pipeline import PipelineLinks

if TYPE_CHECKING:
    from deltamesh.ops.gated_delta_rule.cuda.schedule import FlaSchedule


@dataclass(frozen=True, kw_only=True, eq=False)
class ScanContext:
    """One slice as the gated delta rule sees it.

    Attributes:
        schedule: the chunks of the slice.
        carrier: brings the states of slots `num_given`.. in and takes gradients out.

    Example:
        >>> context = ScanContext.build(chain_pieces(100), finals=[0])
        >>> context.num_given, context.finals
        (0, (0,))
    """

    schedule: Schedule
    carrier: Carrier

    @property
    def num_given(self) -> int:
        """Slots 0..num_given-1 hold the rows of `initial_state`; no carrier touches them."""
        return self.schedule.num_given

    @property
    def finals(self) -> tuple[int, ...]:
        """Pieces whose last state is returned."""
        return self.schedule.final_pieces

    @cached_property
    def fla_schedule(self) -> "FlaSchedule":
        """The slice as the CUDA kernels take it, made at first use and shared by all layers."""
        from deltamesh.ops.gated_delta_rule.cuda.schedule import FlaSchedule  # loads Triton: only where it is used

        s = self.schedule
        return FlaSchedule(s.pieces, s.device, num_given=s.num_given, finals=s.final_pieces)

    def check(self, describe: Callable[[], dict[str, object]]) -> None:
        """Calls `describe`, which checks the arguments of a call and says what ranks must share of them."""
        describe()

    @staticmethod
    def build(
        pieces: Pieces,
        *,
        device: torch.device | str = "cpu",
        carrier: Carrier | None = None,
        num_given: int = 0,
        finals: Sequence[int] = (),
    ) -> "ScanContext":
        """Schedules `pieces`; without a carrier the slice must be the whole stream.

        Raises:
            ValueError: num_given or finals do not fit the pieces.
        """
        return ScanContext(
            schedule=Schedule(pieces, torch.device(device), num_given=num_given, finals=finals),
            carrier=LocalCarrier() if carrier is None else carrier,
        )

    @staticmethod
    def from_plan(pieces: Pieces, links: StateLinks, *, group: Group, device: torch.device) -> "ScanContext":
        """One rank's slice of a plan, its states carried over `group`."""
        return ScanContext.build(pieces, device=device, carrier=make_carrier(links, group, device))


def wanted_carrier(carrier: CarrierName, device: torch.device) -> CarrierName:
    """What "auto" means on a device: the costs that it compares are a CPU's; a GPU has multiprocessors to spare."""
    return "scan" if carrier == "auto" and device.type != "cpu" else carrier


def make_carrier(links: StateLinks, group: Group, device: torch.device) -> Carrier:
    """The carrier that a plan is for."""
    if isinstance(links, PipelineLinks):
        return PipelineCarrier(links, group)
    return ScanCarrier(links, group, device)
