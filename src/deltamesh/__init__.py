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

__version__ = "0.1.0"

__all__ = ["Topology", "__version__", "ops"]


def __getattr__(name: str) -> Any:
    match name:
        case "Topology":
            return import_module("deltamesh.topology").Topology
        case "ops":
            return import_module("deltamesh.ops")
    raise AttributeError(f"module 'deltamesh' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
