"""A micro-batch as on CUDA, on a CPU: torch's kernel for sequences of different lengths, by a stand-in in float64 with
the arguments that versions of torch know, and what the host would wait for or send."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from xray_runtime.models import packing

Bounds = tuple[Tensor, Tensor, int, int]


def kernel(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float | None, window: tuple[int, int]) -> Tensor:
    """Each sequence by itself; the last query sees all keys."""
    assert window == (-1, 0)
    assert bounds[0].dtype == bounds[1].dtype == torch.int32
    queries, keys = (offsets.diff().tolist() for offsets in bounds[:2])
    assert (max(queries), max(keys)) == bounds[2:]
    outs = []
    for q_of, k_of, v_of in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        scores = torch.einsum("iad,jad->aij", q_of, k_of) * (scale or q.shape[-1] ** -0.5)
        unseen = torch.ones_like(scores[0], dtype=torch.bool).triu(len(k_of) - len(q_of) + 1)
        outs.append(torch.einsum("aij,jad->iad", scores.masked_fill(unseen, -torch.inf).softmax(-1), v_of))
    return torch.cat(outs)


def before_2_13(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert query.shape[1] == key.shape[1]
    return kernel(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), scale, window_size)


def torch_2_13(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Any = None, block_table: Any = None, num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    assert cu_seq_k is not None
    assert enable_gqa or groups == 1
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return kernel(query, key, value, (cu_seq_q, cu_seq_k, max_q, max_k), scale, window_size)


def as_on_cuda(monkeypatch: pytest.MonkeyPatch, version: Callable[..., Tensor]) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", version)

    def attention(module: Any, *row: Tensor, trees: Any, scaling: float | None = None, **_: Any) -> tuple[Tensor, None]:
        return packing._in_two_kernels(row[0], row[1], row[2], trees, scaling)[None], None

    monkeypatch.setattr(packing, "_attention", attention)


def uncounted_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """`as_on_cuda`, by a kernel that no mode sees."""

    def outside(*args: Any, **kwargs: Any) -> Tensor:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return torch_2_13(*args, **kwargs)

    # The product looks for an argument in the signature.
    functools.update_wrapper(outside, torch_2_13)
    as_on_cuda(monkeypatch, outside)


class Waits(TorchDispatchMode):
    """Counts operations for which the host would wait for a GPU: what reads a number, or needs one for a shape."""

    NAMES = ("_local_scalar_dense", "nonzero", "repeat_interleave", "masked_select", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES and not (kwargs or {}).get("output_size"):
            self.counts[name] += 1
        if name in ("index", "index_put") and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.counts["index by a mask"] += 1
        return func(*args, **kwargs or {})


class Copies(TorchFunctionMode):
    """Counts what would move a tensor to a GPU or from it, and the bytes that would go to it."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts, self.bytes_to_gpu = counts, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        moves = name == "to" and len(args) > 1 and isinstance(args[1], torch.device)
        if moves or name in ("cpu", "cuda", "tolist", "numpy"):
            self._counts[name] += 1
            self.bytes_to_gpu += args[0].nbytes if moves else 0
        return func(*args, **kwargs or {})


COPIES = (
    *(
        "_to_copy",
        "clone",
        "copy_",
        "cat",
        "stack",
        "index",
        "index_select",
        "embedding",
        "gather",
        "repeat_interleave",
    ),
    *("zeros", "new_zeros", "zeros_like", "full", "fill_", "zero_", "slice_backward", "select_backward"),
    *("embedding_dense_backward", "index_put", "index_put_", "index_copy_", "index_add", "index_add_", "scatter_add_"),
)
"""Operations that compute nothing but where a number stands."""


class Operations(TorchDispatchMode):
    """Counts operations, of the backward pass too, and the bytes that `COPIES` write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        made = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ in COPIES and isinstance(made, torch.Tensor):
            self.copied += made.nbytes
        return made
