"""Offload a trained model to host memory while it is idle, so that others can use the GPU. CUDA only.

The allocator is that of a generator which has one (`GeneratorCapabilities.memory_pool`). It maps the memory again at
the same addresses, so flat buffers and their views stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from xray_runtime.engines.generator import MemoryPool, generator
from xray_runtime.engines.layouts import GENERATORS
from xray_runtime.kernel.plugs import able

TAG = "training"


@contextmanager
def can_offload(wanted: bool) -> Iterator[None]:
    """GPU memory that this thread allocates inside the context is moved by `offload`."""
    if not wanted:
        yield
        return
    with _allocator().use_memory_pool(TAG):
        yield


def offload() -> None:
    """Move it to host memory, and free the allocator's cache."""
    torch.cuda.synchronize()
    _allocator().sleep(offload_tags=(TAG,))
    release()


def release() -> None:
    """Return memory that torch's allocator keeps but nothing uses; nothing without a GPU."""
    torch.cuda.empty_cache()


def onload() -> None:
    """Move it back to the GPU."""
    _allocator().wake_up()
    torch.cuda.synchronize()


def _allocator() -> MemoryPool:
    [name, *_] = able(GENERATORS, "memory_pool")
    return generator(name).memory_pool()
