"""Model directories: written whole or not at all, and read tensor by tensor."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def resolve_directory(name_or_path: str | Path) -> Path:
    """The local directory of a model or adapter: the path itself, or the downloaded snapshot of a Hub id.

    Raises:
        FileNotFoundError: a path (not a Hub id) that does not exist.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or str(name_or_path).startswith((".", "~")):
        raise FileNotFoundError(f"{path} is not a directory; give a model directory or a Hub id")
    return Path(snapshot_download(str(name_or_path), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))


def check_new_directory(path: str | Path) -> Path:
    """`path` if nothing is there yet. With several ranks, call it on all of them before any gathers for a save.

    Raises:
        FileExistsError: something is there.
    """
    path = Path(path)
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} exists already; give a new path, or remove it first")
    return path


@contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """A temporary directory beside `path` that becomes `path` when the block ends, and vanishes if it raises.

    Raises:
        FileExistsError: `path` exists, before or after the block.
    """
    path = check_new_directory(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid4().hex}.partial"
    temporary.mkdir()
    try:
        yield temporary
        check_new_directory(path)
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        temporary.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(named_tensors: Iterable[tuple[str, Tensor]], directory: Path, max_shard_bytes: int) -> None:
    """Writes tensors as `model.safetensors` or as numbered shards with an index; one shard is in memory at a time.

    Raises:
        ValueError: a name that comes twice.
    """
    files: list[Path] = []
    owner: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    shard_bytes = total = 0

    def flush() -> None:
        files.append(directory / f"shard-{len(files)}.safetensors")
        save_file(shard, files[-1], metadata={"format": "pt"})
        shard.clear()

    for name, tensor in named_tensors:
        if name in owner:
            raise ValueError(f"{name} was given twice for one checkpoint; give every tensor once")
        size = tensor.numel() * tensor.element_size()
        if shard and shard_bytes + size > max_shard_bytes:
            flush()
            shard_bytes = 0
        owner[name] = len(files)
        shard[name] = tensor.detach().to("cpu", copy=False).contiguous()
        shard_bytes, total = shard_bytes + size, total + size
    flush()

    if len(files) == 1:
        files[0].rename(directory / WEIGHTS)
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for file, name in zip(files, names, strict=True):
        file.rename(directory / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in owner.items()}}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def tensor_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory.

    Raises:
        FileNotFoundError: neither `model.safetensors` nor an index, or a shard of the index is missing.
        ValueError: the index is not one.
    """
    if (directory / INDEX).is_file():
        try:
            shards = set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{directory / INDEX} is no index of weights ({type(error).__name__}: {error}); copy it again"
            ) from error
        files = [directory / name for name in sorted(shards)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise FileNotFoundError(f"{directory}: {INDEX} names files that are not there: {', '.join(missing)}")
        return files
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    raise FileNotFoundError(f"{directory} has neither {WEIGHTS} nor {INDEX}; only safetensors checkpoints are read")


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16", as configuration files write it."""
    return str(dtype).removeprefix("torch.")
