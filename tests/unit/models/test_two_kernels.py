"""Attention as on CUDA, by torch's kernel for sequences of different lengths, against the CPU's. A stand-in in float64
takes the kernel's place, with the arguments that versions of torch know. And how often a pass waits for a GPU."""

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

from tests.unit.models.families import model
from tests.unit.models.tensors import batch
from xray_runtime.algorithms import logprobs
from xray_runtime.data.batch import StepTotals
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models import heads, packing
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import training_loss

Bounds = tuple[Tensor, Tensor, int, int]
LENGTHS, PROMPTS, FIRST = (1, 7, 30, 19, 12), (1, 3, 10, 8, 8), (0, 1, 2, 3, 3)
"""Tokens of each sequence and of its prompt, and the first sequence with that prompt: the last two share theirs."""


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


@pytest.mark.parametrize("version", [before_2_13, torch_2_13])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("shared", [True, False])
def test_two_kernels_are_the_blocks(
    version: Callable[..., Tensor], heads: int, kv_heads: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(heads * kv_heads)
    prompts = packing.Prompts(torch.tensor(FIRST), torch.tensor(PROMPTS)) if shared else None
    trees = packing.Trees.of(torch.tensor(LENGTHS), prompts)
    assert len(trees.suffixes) == 2 * shared
    row = [torch.randn(1, n, len(trees.computed), 8, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    grad = torch.randn(1, len(trees.computed), heads, 8, dtype=torch.float64)

    def outcome(attend: Callable[..., Any]) -> list[Tensor]:
        given = [x.clone().requires_grad_() for x in row]
        out, _ = attend(None, *given, None, trees=trees, scaling=0.3)
        out.backward(grad)
        return [out, *(x.grad for x in given if x.grad is not None)]

    expected = outcome(packing._attention)
    as_on_cuda(monkeypatch, version)
    for found, wanted in zip(outcome(packing._attention), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


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
    """Counts what would move a tensor to a GPU or from it."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        moves = name == "to" and len(args) > 1 and isinstance(args[1], torch.device)
        if moves or name in ("cpu", "cuda", "tolist", "numpy"):
            self._counts[name] += 1
        return func(*args, **kwargs or {})


def waits(layers: int, max_logits: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Waits for the host in one micro-batch of PPO, forward and backward."""

    def chunked(*args: Any, **kwargs: Any) -> Any:
        return logprobs.chunked_logprobs_and_entropy(*args, **kwargs, max_logits=max_logits)

    def outside(*args: Any, **kwargs: Any) -> Tensor:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return torch_2_13(*args, **kwargs)

    # The product looks for an argument in the signature.
    functools.update_wrapper(outside, torch_2_13)
    monkeypatch.setattr(heads, "chunked_logprobs_and_entropy", chunked)
    as_on_cuda(monkeypatch, outside)
    module = HeadedLM(model("llama", num_hidden_layers=layers))
    lengths, prompts = torch.tensor(LENGTHS), torch.tensor(PROMPTS)
    rows = {"input_ids": torch.arange(sum(LENGTHS)) % 50, "lengths": lengths, "prompt_lengths": prompts}
    rows["alike"] = torch.tensor(FIRST)
    count = int((lengths - prompts).sum())
    rows |= {name: torch.zeros(count, dtype=torch.float64) for name in ("old_logprobs", "advantages", "weights")}
    found, given = Waits(), batch(rows)
    with found, Copies(found.counts):
        loss, _ = training_loss(
            module, PPOObjective(PPOStageConfig(entropy_coef=0.1)), given, StepTotals(tokens=float(count))
        )  # type: ignore[arg-type]
        loss.backward()
    return found.counts


def test_a_micro_batch_synchronizes_with_the_gpu_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    few = waits(1, 2**20, monkeypatch)
    # One more in each layer, or in each chunk of logits, would be seen.
    assert waits(3, 2**20, monkeypatch) == few
    assert waits(1, 100, monkeypatch) == few
    assert few.total() <= 40
