"""Memory of the op on a CPU: buffers that batches reuse, and large results on huge pages.

The first touch of a page costs more than the arithmetic on it, so nothing is allocated per chunk.
"""

import math

import numpy as np
import torch
from torch import Tensor

_HUGE = 4 << 20  # bytes from which numpy asks the kernel for huge pages
_NUMPY_DTYPES = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16}


def fresh(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that holds nothing yet (NaN under torch's deterministic mode, as with `torch.empty`).

    Large CPU tensors live on huge pages where the system has them, which makes their first touch about three times
    cheaper than with `torch.empty`.
    """
    size = math.prod(shape)
    if device.type != "cpu" or dtype not in _NUMPY_DTYPES or size * dtype.itemsize < _HUGE:
        return torch.empty(shape, dtype=dtype, device=device)
    line = 64 // dtype.itemsize
    memory = np.empty(size + line, dtype=_NUMPY_DTYPES[dtype])
    skip = -memory.ctypes.data % 64 // dtype.itemsize  # on a cache line, like torch's own
    x = torch.from_numpy(memory[skip : skip + size].reshape(shape))
    if torch.are_deterministic_algorithms_enabled():  # then torch.empty fills with NaN
        x.fill_(math.nan)
    return x


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
