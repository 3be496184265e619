"""Saving from a mesh: whole tensors are gathered over tp one by one, one rank writes, all ranks learn how it went."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from deltamesh.distributed.agreement import agree
from deltamesh.distributed.collectives import Group, all_gather_rows
from deltamesh.distributed.mesh import Mesh
from deltamesh.models import HybridCausalLM, ParamSpec, assemble
from deltamesh.models.files import check_new_directory
from deltamesh.models.lora import export_adapter
from deltamesh.models.lora_targets import LoraTargets
from deltamesh.models.weights import save_directory
from deltamesh.train.setup import ModelSettings

NamedTensors = Iterator[tuple[str, Tensor]]


def full_tensors(tensors: Mapping[str, Tensor], specs: Mapping[str, ParamSpec], tp: Group) -> NamedTensors:
    """Whole tensors from every tp rank's parts, in name order; every rank of the group must take all of them.

    Args:
        tensors: this rank's parts (parameters, or gradients of them), by parameter name.
        specs: how each is laid over tp.
        tp: the group.
    """
    for name in sorted(tensors):
        spec, local = specs[name], tensors[name].detach()
        shapes = [spec.local_shape(rank, tp.size) for rank in range(tp.size)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        padded = local.new_zeros(max(sizes))
        padded[: local.numel()] = local.reshape(-1)
        shards = all_gather_rows(padded, tp).view(tp.size, -1)
        parts = [shard[:size].view(shape) for shard, size, shape in zip(shards, sizes, shapes, strict=True)]
        yield name, assemble(parts, spec)


def export_lora(
    model: HybridCausalLM, targets: LoraTargets | None, settings: ModelSettings, mesh: Mesh, path: Path
) -> None:
    """Writes the adapter in PEFT's format.

    Raises:
        ValueError: the model has no adapter.
        FileExistsError: `path` exists.
    """
    lora = settings.lora
    if lora is None or targets is None:
        raise ValueError("the model was built without lora=, so there is no adapter to export; see save_pretrained")
    parameters = dict(model.named_parameters())
    factors = {name: parameters[name] for name in model.lora_specs}
    _write_from_first(
        lambda tensors: export_adapter(tensors, lora, targets, path, base_model_name_or_path=settings.name_or_path),
        full_tensors(factors, model.lora_specs, mesh.tp),
        mesh,
        path,
    )


def save_pretrained(model: HybridCausalLM, mesh: Mesh, path: Path) -> None:
    """Writes the base weights as a Hugging Face directory.

    Raises:
        FileExistsError: `path` exists.
    """
    parameters = dict(model.named_parameters())
    base = {name: parameters[name] for name in model.base_specs}
    _write_from_first(
        lambda tensors: save_directory(tensors, model.config, path, dtype=model.dtype),
        full_tensors(base, model.base_specs, mesh.tp),
        mesh,
        path,
    )


def _write_from_first(write: Callable[[NamedTensors], None], tensors: NamedTensors, mesh: Mesh, path: Path) -> None:
    first = mesh.world.rank == 0
    agree(lambda: first and check_new_directory(path), lambda _: "free", mesh.world, what=f"saving to {path}")

    def gather_and_write() -> None:
        try:
            if first:
                write(tensors)
        finally:
            for _ in tensors:  # peers gather every tensor, whatever became of the writer
                pass

    agree(gather_and_write, lambda _: "written", mesh.world, what=f"saving to {path}")


def shape_digest(model: HybridCausalLM) -> str:
    """Identifies what is built and trained: names, full shapes, dtypes and which parameters are trainable."""
    lines = [f"{name} {model.specs[name].shape} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
