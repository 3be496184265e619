"""Memory of large results on a CPU: blocks that nobody uses any more are kept for the next call.

The first touch of a page costs more than the arithmetic on it; an accelerator's allocator keeps its blocks, too.
"""

import functools
import math
import os
import threading
import weakref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LARGE = 4 << 20  # bytes from which numpy asks the kernel for huge pages
_LINE = 64  # bytes of a cache line, on which torch's own memory begins too

_Block = npt.NDArray[np.uint8]


def fresh(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that holds nothing yet (NaN under torch's deterministic mode, as with `torch.empty`).

    Large CPU tensors come from `BlockCache`.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _LARGE:
        return torch.empty(shape, dtype=dtype, device=device)
    # a tensor of its own, not a view: what an autograd function returns may then be changed in place
    memory = _blocks().take(size).untyped_storage()
    x: Tensor = torch.empty(0, dtype=dtype).set_(memory, 0, torch.Size(shape))  # type: ignore[call-overload]
    if (
        torch.are_deterministic_algorithms_enabled()  # then torch.empty fills with NaN
        and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        and dtype.is_floating_point
    ):
        x.fill_(math.nan)
    return x


class BlockCache:
    """Large blocks of memory, kept when they are given back.

    Used and idle blocks together never hold more than the most that was in use at one time: what does not fit under
    that is returned to the system, the smallest idle blocks first.

    Example:
        >>> cache = BlockCache()
        >>> first = cache.take(1000)
        >>> place = first.data_ptr()
        >>> del first
        >>> cache.take(900).data_ptr() == place
        True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Block] = []
        # Filled by finalizers, which may run at any moment in any thread, also in one that holds the lock.
        self._returned: list[_Block] = []
        self._used = self._most_used = 0

    def take(self, size: int) -> Tensor:
        """uint8 [size]; the block comes back by itself when no tensor uses this memory any more."""
        block = self._take(size + _LINE)
        if block is None:
            return torch.empty(size, dtype=torch.uint8)
        skip = -block.ctypes.data % _LINE
        part = block[skip : skip + size]
        weakref.finalize(part, self._returned.append, block).atexit = False
        return torch.from_numpy(part)  # its storage holds `part`

    def _take(self, size: int) -> _Block | None:
        """A block, or None while the cache is at work: a finalizer may ask in the thread that holds the lock."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            while self._returned:
                self._idle.append(self._returned.pop())
                self._used -= self._idle[-1].nbytes
            self._idle.sort(key=lambda b: b.nbytes)
            found = next((n for n, b in enumerate(self._idle) if size <= b.nbytes <= 2 * size), None)
            block = np.empty(size, dtype=np.uint8) if found is None else self._idle.pop(found)
            self._used += block.nbytes
            self._most_used = max(self._most_used, self._used)
            while self._idle and self._used + self.idle_bytes > self._most_used:
                self._idle.pop(0)
            return block
        finally:
            self._lock.release()

    @property
    def idle_bytes(self) -> int:
        """Bytes held for later, without those that came back since the last `take`."""
        return sum(b.nbytes for b in self._idle)


@functools.cache
def _blocks() -> BlockCache:
    """The process's own: memory belongs to the process, whoever asks for it."""
    return BlockCache()


os.register_at_fork(after_in_child=_blocks.cache_clear)  # the parent's lock may be held, and its blocks are its own
