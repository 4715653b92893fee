"""The overhead of a micro-batch: calls of torch from Python, operations, copies, bytes sent to a GPU, and how often the
host waits for a GPU. Only the bytes grow with the number of rows or replies: they are those of the columns. Each budget
is what was measured and a tenth more."""

from __future__ import annotations

import ast
import functools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.source_trees import nodes
from tests.unit.models.families import SIZES, model
from tests.unit.models.on_cuda import Copies, Operations, Waits, uncounted_kernel
from xray_runtime.algorithms import logprobs
from xray_runtime.cluster.micro_batches import as_arrays, as_tensors
from xray_runtime.data.batch import LabelledBatch, PairBatch, PolicyBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.threads import in_threads
from xray_runtime.methods.common.preference_objectives import DPOObjective, KTOObjective
from xray_runtime.methods.dpo.config import DPOConfig
from xray_runtime.methods.kto.config import KTOConfig
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import CriticObjective, PPOObjective
from xray_runtime.models import heads, packing
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Objective, SFTObjective, training_loss
from xray_runtime.models.reward_objective import RewardObjective

PROMPT, REPLY = 6, 4


class Calls(TorchFunctionMode):
    """Counts calls of torch from Python; attributes of tensors are none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") != "__get__"
        return func(*args, **kwargs or {})


Lengths = list[tuple[int, int]]
"""Tokens of prompt and reply of each row."""


def even(rows: int) -> Lengths:
    return [(PROMPT, REPLY)] * rows


def texts(lengths: Lengths, first: int = 10) -> Ragged:
    """Rows with a prompt of their own each."""
    return Ragged.of([[first + row, *range(1, sum(length))] for row, length in enumerate(lengths)])


def columns(lengths: Lengths) -> dict[str, Any]:
    prompts = np.array([prompt for prompt, _ in lengths])
    return {"input_ids": texts(lengths), "prompt_lengths": prompts, "id": np.arange(len(lengths))}


def policy_rows(lengths: Lengths) -> TextBatch:
    names = ("old_logprobs", "advantages", "weights", "values", "returns")
    by_token = Ragged.of([[0.0] * reply for _, reply in lengths], np.float32)
    return PolicyBatch(**columns(lengths), **dict.fromkeys(names, by_token))


def groups(lengths: Lengths) -> TextBatch:
    """Pairs of rows with one prompt, as in GRPO."""
    rows = policy_rows(lengths)
    ids = [np.where(np.arange(len(row)) == 0, 10 + number // 2, row) for number, row in enumerate(rows.input_ids)]
    return rows.with_columns(input_ids=Ragged.of(ids), values=None, returns=None)


def pairs(lengths: Lengths) -> TextBatch:
    scores = {name: np.zeros(len(lengths), np.float32) for name in ("ref_chosen", "ref_rejected")}
    return PairBatch(**columns(lengths), rejected_ids=texts(lengths, 50), **scores)


def labelled(lengths: Lengths) -> TextBatch:
    count = len(lengths)
    return LabelledBatch(
        **columns(lengths), ref_reply_logprobs=np.zeros(count, np.float32), desirable=np.arange(count) % 2 == 0
    )


class Budget(NamedTuple):
    """The most of training, and of scoring."""

    calls: tuple[int, int]
    """Calls of torch for a model of one layer."""
    operations: tuple[int, int]
    waits: int
    calls_a_layer: int = 84
    """For each further layer; most of them come from transformers' own code."""
    operations_a_layer: tuple[int, int] = (290, 106)


class Case(NamedTuple):
    objective: Callable[[], Objective[Any]]
    rows: Callable[[Lengths], TextBatch]
    most: Budget
    scalar_head: bool = False


CASES = {
    "sft": Case(SFTObjective, lambda lengths: TextBatch(**columns(lengths)), Budget((295, 310), (525, 300), 29)),
    "reward": Case(RewardObjective, pairs, Budget((300, 285), (530, 280), 27), scalar_head=True),
    "dpo": Case(lambda: DPOObjective(DPOConfig()), pairs, Budget((360, 315), (595, 305), 28)),
    "kto": Case(lambda: KTOObjective(KTOConfig()), labelled, Budget((325, 300), (570, 295), 28)),
    "policy": Case(lambda: PPOObjective(PPOStageConfig()), policy_rows, Budget((345, 295), (600, 290), 28)),
    # Suffixes with their prompts attend in a call of their own.
    "groups": Case(lambda: PPOObjective(PPOStageConfig()), groups, Budget((435, 390), (735, 380), 36, 118, (370, 143))),
    "critic": Case(lambda: CriticObjective(PPOStageConfig()), policy_rows, Budget((310, 295), (565, 290), 28), True),
}
OPERATIONS_A_BLOCK, OPERATIONS_A_CHUNK = 46, 50
"""Of training: of each further block of sequences in each layer, and of each further chunk of logits."""
COPIED_A_LAYER = (20.5, 9.3)
"""Bytes that copies write in each further layer, of training and of scoring, beside those of one activation [N, H]."""
SCORING = pytest.mark.parametrize("scoring", [False, True], ids=["training", "scoring"])


class Cost(NamedTuple):
    """The overhead of one micro-batch, in training or in scoring."""

    calls: int
    operations: int
    copied: int
    num_tokens: int

    def copied_beside(self, other: Cost) -> float:
        """Bytes more than of `other`, as activations [N, H]."""
        return (self.copied - other.copied) / (self.num_tokens * int(SIZES["hidden_size"]) * 8)


def work(name: str, lengths: Lengths, layers: int, scoring: bool) -> tuple[TextBatch[Tensor], Callable[[], object]]:
    """(a micro-batch, what to do with it)."""
    case = CASES[name]
    module = HeadedLM(model("llama", num_hidden_layers=layers), scalar_head=case.scalar_head)
    totals, batch = StepTotals(tokens=1.0, rows=1.0), as_tensors(case.rows(lengths))

    def score() -> object:
        with torch.no_grad():
            return case.objective().score(module, batch)

    return batch, score if scoring else lambda: training_loss(module, case.objective(), batch, totals).loss.backward()


def cost(name: str, lengths: Lengths, layers: int, scoring: bool = False) -> Cost:
    batch, task = work(name, lengths, layers, scoring)
    operations, calls = Operations(), Calls()
    with operations, calls:
        task()
    return Cost(calls.count, operations.count, operations.copied, sum(len(side.values) for side in batch.sides()))


@SCORING
@pytest.mark.parametrize("name", CASES)
def test_calls_operations_and_copies(name: str, scoring: bool) -> None:
    most, one, two = CASES[name].most, *(cost(name, even(6), layers, scoring) for layers in (1, 2))
    assert one.calls <= most.calls[scoring]
    assert one.operations <= most.operations[scoring]
    assert two.calls - one.calls <= most.calls_a_layer
    assert two.operations - one.operations <= most.operations_a_layer[scoring]
    assert two.copied_beside(one) <= COPIED_A_LAYER[scoring]
    # Each further layer takes as many, and one more for each row would be seen.
    three, wide = cost(name, even(6), 3, scoring), cost(name, even(12), 1, scoring)
    assert (three.calls - two.calls, three.operations - two.operations) == (
        two.calls - one.calls,
        two.operations - one.operations,
    )
    assert (wide.calls, wide.operations) == (one.calls, one.operations)


def test_blocks_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row by itself in attention, and logits for few tokens at a time."""
    with monkeypatch.context() as each:
        each.setattr(packing, "CALL_SCORES", -1000)
        found = {(n, layers): cost("policy", even(n), layers).operations for n in (2, 4) for layers in (1, 2)}
    assert 0 < found[4, 2] - found[2, 2] - (found[4, 1] - found[2, 1]) <= 2 * OPERATIONS_A_BLOCK

    def in_chunks(num_chunks: int) -> int:
        tokens = 12 * REPLY // num_chunks
        size = tokens * int(SIZES["vocab_size"])
        chunked = functools.partial(logprobs.chunked_logprobs_and_entropy, max_logits=size)
        monkeypatch.setattr(heads, "chunked_logprobs_and_entropy", chunked)
        return cost("policy", even(12), 1).operations

    assert 0 < in_chunks(4) - in_chunks(2) <= 2 * OPERATIONS_A_CHUNK


@SCORING
@pytest.mark.parametrize("name", CASES)
def test_waits_for_a_gpu(name: str, scoring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision, where one kernel takes sequences of all lengths."""
    uncounted_kernel(monkeypatch)

    def waits(lengths: Lengths, layers: int) -> Counter[str]:
        _, task = work(name, lengths, layers, scoring)
        found = Waits()
        with found, Copies(found.counts):
            task()
        return found.counts

    few = waits(even(6), 1)
    assert few.total() <= CASES[name].most.waits
    # One more in each layer, for each row, in each block or in each chunk of logits would be seen.
    assert waits(even(6), 3) == few
    assert waits(even(12), 1) == few
    assert waits([(PROMPT, REPLY + row) for row in range(6)], 1) == few
    chunked = functools.partial(logprobs.chunked_logprobs_and_entropy, max_logits=100)
    monkeypatch.setattr(heads, "chunked_logprobs_and_entropy", chunked)
    assert waits(even(6), 1) == few


def test_bytes_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the rows themselves: the places of tokens in the row and back, and where each sequence ends."""
    uncounted_kernel(monkeypatch)

    def sent(lengths: Lengths) -> int:
        _, task = work("policy", lengths, 2, False)
        copies = Copies(Counter())
        with copies:
            task()
        return copies.bytes_to_gpu

    # Three int64 a token, two int32 a sequence.
    assert sent(even(12)) - sent(even(6)) == 6 * (3 * 8 * (PROMPT + REPLY) + 2 * 4)


def test_bytes() -> None:
    """Of six more rows, each way."""

    def moved(rows: int) -> tuple[int, int, int]:
        sent = policy_rows(even(rows)).on_wire()
        module = HeadedLM(model("llama", num_hidden_layers=1))
        tensors = as_tensors(sent)
        arrived = tensors.map(lambda tensor: tensor.numpy()).num_bytes
        with torch.no_grad():
            scores = as_arrays(PPOObjective(PPOStageConfig()).score(module, tensors))
        return sent.num_bytes, arrived, scores.num_bytes

    # Ten ids of 8 bytes, five numbers of 4 for each of four reply tokens; two numbers, and an offset a ragged column.
    sent = 10 * 8 + 2 * 8 + 5 * 4 * 4 + 6 * 8
    assert np.subtract(moved(12), moved(6)).tolist() == [6 * sent, 6 * (sent + 8), 6 * (2 * 4 * 4 + 2 * 8)]


@pytest.mark.parametrize("name", CASES)
def test_two_are_in_their_passes_at_the_same_time(
    name: str, torch_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that both need would let the first pass end before the second begins."""
    torch_threads(2)
    case = CASES[name]
    module = HeadedLM(model("llama", num_hidden_layers=1), scalar_head=case.scalar_head)
    met, hidden = threading.Barrier(2), HeadedLM.hidden

    def meeting(*args: Any) -> Any:
        met.wait(30)  # broken if the other is not here
        return hidden(*args)

    monkeypatch.setattr(HeadedLM, "hidden", meeting)
    totals, batch = StepTotals(tokens=1.0, rows=1.0), as_tensors(case.rows(even(4)))
    passes = in_threads(lambda number: training_loss(module, case.objective(), batch, totals).loss.item(), range(2))
    first, second = (loss for _, loss in passes)
    assert first == second


def test_no_pass_takes_the_lock_of_functools() -> None:
    runtime = Path(__file__).parents[3] / "xray_runtime"
    files = [path for folder in ("algorithms", "models", "methods") for path in (runtime / folder).rglob("*.py")]
    imported = [
        (path, alias.name)
        for path in files
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module == "functools"
        for alias in node.names
    ]
    assert {"cache", "partial"} <= {name for _, name in imported}
    assert not [path for path, name in imported if name == "cached_property"]
