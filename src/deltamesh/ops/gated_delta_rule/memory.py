"""Buffers of the op that its batches reuse: nothing is allocated per chunk."""

import math

import torch
from torch import Tensor

from deltamesh.ops.memory import fresh


class Workspace:
    """Named buffers that every batch writes anew."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._flat: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}  # chunks ask for the same ones again and again

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The buffer `name` in this shape; what it held under this name is lost."""
        view = self._views.get((name, shape))
        if view is not None:
            return view
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = torch.empty(size, dtype=self.dtype, device=self.device)
            self._views = {key: v for key, v in self._views.items() if key[0] != name}
        view = self._views[name, shape] = flat[:size].view(shape)
        return view


class Arena:
    """One allocation handed out in parts that all stay."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = fresh((size,), dtype, device)
        self._used = 0

    def take(self, *shape: int) -> Tensor:
        """The next part, in this shape."""
        start = self._used
        self._used += math.prod(shape)
        assert self._used <= len(self._flat), "the arena was made for all parts"
        return self._flat[start : self._used].view(shape)


class StatePool:
    """Buffers of one shape that come back when nobody needs them."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._idle: list[Tensor] = []

    def take(self) -> Tensor:
        """A buffer of the pool's shape."""
        if self._idle:
            return self._idle.pop()
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back."""
        self._idle.append(buffer)
