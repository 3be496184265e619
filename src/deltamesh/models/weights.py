"""Loading one tp rank's part of a Hugging Face checkpoint, and saving a full one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig

from deltamesh.models.files import dtype_name, new_directory, resolve_directory, tensor_files, write_tensors
from deltamesh.models.qwen3_5 import HybridCausalLM
from deltamesh.models.sharding import ParamSpec
from deltamesh.models.specs import param_specs

MAX_SHARD_BYTES = 5 * 2**30
_LISTED = 20
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class WeightsError(ValueError):
    """The tensors of a checkpoint are not those of the model."""


def checkpoint_name(key: str) -> str | None:
    """The parameter that a checkpoint key holds, or None for a key of a part that is not run here.

    Example:
        >>> checkpoint_name("model.language_model.norm.weight")
        'model.norm.weight'
        >>> checkpoint_name("model.visual.patch_embed.proj.weight") is None
        True
    """
    if key.startswith(("mtp.", "model.visual.", "visual.")):
        return None
    return key.replace("model.language_model.", "model.", 1) if key.startswith("model.language_model.") else key


def read_local(tensor: Any, spec: ParamSpec, tp_rank: int, tp_size: int) -> Tensor:
    """This rank's part of a safetensors slice object; other parts are not read from the file."""
    before = (slice(None),) * (spec.dim or 0)
    parts = [tensor[(*before, slice(start, stop))] for start, stop in spec.ranges(tp_rank, tp_size)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=spec.dim or 0)


@torch.no_grad()
def load_files(
    files: Iterable[Path],
    parameters: Mapping[str, nn.Parameter],
    specs: Mapping[str, ParamSpec],
    *,
    tp_rank: int,
    tp_size: int,
    rename: Callable[[str], str | None],
    source: str,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Copies this rank's part of every named parameter out of safetensors files, cast to the parameter's dtype.

    Args:
        parameters: to fill, by name; each name must be in `specs`.
        rename: checkpoint key -> parameter name, or None to pass over the key.
        source: what the files are, for messages.
        tied: names that need not be there, and must equal the parameter given for them where they are.

    Raises:
        WeightsError: missing, unknown, doubled or wrongly shaped tensors; all are listed, and nothing was changed.
    """
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        copies: dict[str, Any] = {}
        problems: list[str] = []
        for file in files:
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                raise WeightsError(
                    f"{file} is no whole safetensors file ({error}); copy or download it again"
                ) from error
            for key in handle.keys():  # noqa: SIM118 - not a mapping
                name = rename(key)
                if name is None:
                    continue
                if name in found:
                    problems.append(f"given twice: {name} (as {key} in {file.name})")
                elif name in (tied or {}):
                    copies[name] = handle.get_slice(key)
                elif name not in parameters:
                    problems.append(f"unknown: {key}")
                else:
                    found[name] = handle.get_slice(key)
        problems += [f"missing: {name} {specs[name].shape}" for name in parameters if name not in found]
        problems += [
            f"wrong shape: {name} is {tuple(tensor.get_shape())}, the model needs {specs[name].shape}"
            for name, tensor in found.items()
            if tuple(tensor.get_shape()) != specs[name].shape
        ]
        problems += [
            f"not floating point: {name} is {tensor.get_dtype()}; quantised checkpoints are not read"
            for name, tensor in found.items()
            if tensor.get_dtype() not in _FLOATS
        ]
        problems += [
            f"wrong shape: {name} is {tuple(copy.get_shape())}, the model needs {specs[(tied or {})[name]].shape}"
            for name, copy in copies.items()
            if tuple(copy.get_shape()) != specs[(tied or {})[name]].shape
        ]
        for name, other in (tied or {}).items():
            if name in copies and other in found and not problems:
                pair = (read_local(t, specs[other], tp_rank, tp_size) for t in (copies[name], found[other]))
                if not torch.equal(*pair):
                    problems.append(
                        f"not equal: {name} and {other}, but tie_word_embeddings is set; unset it in the config"
                    )
        if problems:
            rest = f"\n  ... and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
            listed = "\n  ".join(problems[:_LISTED])
            raise WeightsError(f"{source} does not fit the model; nothing was loaded:\n  {listed}{rest}")
        for name, tensor in found.items():
            parameters[name].copy_(read_local(tensor, specs[name], tp_rank, tp_size))


def load_directory(model: HybridCausalLM, name_or_path: str | Path) -> None:
    """Fills the base weights of `model` with this rank's part of a checkpoint.

    Reads `model.safetensors` or the shards of its index, of the text or of the vision-language class (whose vision and
    multi-token-prediction weights are passed over). A tied checkpoint may hold its head a second time, but not another.

    Raises:
        WeightsError: the tensors are not those of the model; nothing was changed.
        FileNotFoundError: no such directory, or no safetensors in it.
    """
    directory = resolve_directory(name_or_path)
    parameters = dict(model.named_parameters())
    load_files(
        tensor_files(directory),
        {name: parameters[name] for name in model.base_specs},
        model.base_specs,
        tp_rank=model.tp_rank,
        tp_size=model.tp_size,
        rename=checkpoint_name,
        source=str(directory),
        tied={"lm_head.weight": "model.embed_tokens.weight"} if model.config.tie_word_embeddings else None,
    )


def save_directory(
    named_full_tensors: Iterable[tuple[str, Tensor]],
    config: Qwen3_5TextConfig,
    path: str | Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a directory that `Qwen3_5ForCausalLM.from_pretrained` and `load_directory` read. Atomic: whole or absent.

    Args:
        named_full_tensors: every parameter once, whole; consumed one by one, so that a generator may gather each over
            tp when it is asked for. Written in the dtype it has (`A_log` and `dt_bias` stay fp32).
        config: written as config.json.
        path: must not exist.
        dtype: the model's, noted in config.json.
        max_shard_bytes: larger checkpoints are split into files of at most this size (or of one tensor).

    Raises:
        FileExistsError: `path` exists.
        WeightsError: a tensor that the model does not have, has in another shape, or that was not given.
        ValueError: a tensor given twice.
    """
    specs = param_specs(config)
    missing = dict(specs)

    def checked() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_full_tensors:
            spec = missing.pop(name, None)
            if spec is not None and tuple(tensor.shape) != spec.shape:
                raise WeightsError(f"cannot save {name} of shape {tuple(tensor.shape)}: the whole is {spec.shape}")
            if name not in specs:
                raise WeightsError(f"cannot save {name}: the model has no such parameter")
            yield name, tensor
        if missing:
            raise WeightsError(f"cannot save a model without {', '.join(list(missing)[:_LISTED])}")

    with new_directory(path) as temporary:
        written = deepcopy(config)
        written.architectures = ["Qwen3_5ForCausalLM"]
        written.dtype = dtype_name(dtype)
        written.save_pretrained(temporary)
        write_tensors(checked(), temporary, max_shard_bytes)
