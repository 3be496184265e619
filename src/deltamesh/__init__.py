"""Train hybrid Gated DeltaNet and attention language models with one result on every topology.

    >>> import deltamesh as dm
    >>> dm.Topology(tp=2, cp=2).world_size
    4

Names are imported on first use, so that `import deltamesh` and the command line's help do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltamesh.topology import Topology as Topology
    from deltamesh.train.micro_batches import ForwardInput as ForwardInput
    from deltamesh.train.micro_batches import ForwardOutput as ForwardOutput
    from deltamesh.train.micro_batches import MicroBatch as MicroBatch
    from deltamesh.train.optim import AdamParams as AdamParams
    from deltamesh.train.optim import StepResult as StepResult
    from deltamesh.train.trainer_rank import TrainerRank as TrainerRank

__version__ = "0.1.0"

_HOMES = {
    "AdamParams": "deltamesh.train.optim",
    "ForwardInput": "deltamesh.train.micro_batches",
    "ForwardOutput": "deltamesh.train.micro_batches",
    "MicroBatch": "deltamesh.train.micro_batches",
    "StepResult": "deltamesh.train.optim",
    "Topology": "deltamesh.topology",
    "TrainerRank": "deltamesh.train.trainer_rank",
}

__all__ = [
    "AdamParams",
    "ForwardInput",
    "ForwardOutput",
    "MicroBatch",
    "StepResult",
    "Topology",
    "TrainerRank",
    "__version__",
    "ops",
]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("deltamesh.ops")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'deltamesh' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
