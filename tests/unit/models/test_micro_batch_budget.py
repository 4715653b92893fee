"""What a micro-batch costs beside its arithmetic: calls of torch from Python, operations, bytes that are moved. None of
them grows with the number of rows or replies but the bytes, which are those of the columns. How often the host waits
for a GPU is in `test_two_kernels`."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.source_trees import nodes
from tests.unit.models.families import model
from xray_runtime.cluster.micro_batches import as_arrays, as_tensors
from xray_runtime.data.batch import LabelledBatch, PairBatch, PolicyBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.threads import in_threads
from xray_runtime.methods.common.preference_objectives import DPOObjective, KTOObjective
from xray_runtime.methods.dpo.config import DPOConfig
from xray_runtime.methods.kto.config import KTOConfig
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import CriticObjective, PPOObjective
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


class Operations(TorchDispatchMode):
    """Counts operations, of the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def texts(rows: int, first: int = 10) -> Ragged:
    """Rows of equal lengths with a prompt of their own each."""
    return Ragged.of([[first + row, *range(1, PROMPT + REPLY)] for row in range(rows)])


def columns(rows: int) -> dict[str, Any]:
    return {"input_ids": texts(rows), "prompt_lengths": np.full(rows, PROMPT), "id": np.arange(rows)}


def by_token(rows: int) -> Ragged:
    return Ragged.of([[0.0] * REPLY] * rows, np.float32)


def policy_rows(rows: int) -> TextBatch:
    names = ("old_logprobs", "advantages", "weights", "values", "returns")
    return PolicyBatch(**columns(rows), **{name: by_token(rows) for name in names})


def pairs(rows: int) -> TextBatch:
    scores = {name: np.zeros(rows, np.float32) for name in ("ref_chosen", "ref_rejected")}
    return PairBatch(**columns(rows), rejected_ids=texts(rows, 50), **scores)


def labelled(rows: int) -> TextBatch:
    return LabelledBatch(
        **columns(rows), ref_reply_logprobs=np.zeros(rows, np.float32), desirable=np.arange(rows) % 2 == 0
    )


CASES: dict[str, tuple[Callable[[], Objective[Any]], Callable[[int], TextBatch], int, int]] = {
    "sft": (SFTObjective, lambda rows: TextBatch(**columns(rows)), 320, 560),
    "reward": (RewardObjective, pairs, 320, 560),
    "dpo": (lambda: DPOObjective(DPOConfig()), pairs, 380, 620),
    "kto": (lambda: KTOObjective(KTOConfig()), labelled, 350, 600),
    "policy": (lambda: PPOObjective(PPOStageConfig()), policy_rows, 370, 630),
    "critic": (lambda: CriticObjective(PPOStageConfig()), policy_rows, 330, 590),
}
"""Objective, rows, and of a micro-batch of a model of one layer the most calls of torch and the most operations."""
CALLS_A_LAYER, OPERATIONS_A_LAYER = 84, 290
"""Of each further layer; transformers' own code makes most of them."""


def counts(name: str, rows: int, layers: int) -> tuple[int, int]:
    """(calls, operations) of one micro-batch, forward and backward."""
    objective, made, *_ = CASES[name]
    module = HeadedLM(model("llama", num_hidden_layers=layers), scalar_head=name in ("reward", "critic"))
    totals, batch = StepTotals(tokens=1.0, rows=1.0), as_tensors(made(rows))
    operations, calls = Operations(), Calls()
    with operations, calls:
        training_loss(module, objective(), batch, totals).loss.backward()
    return calls.count, operations.count


@pytest.mark.parametrize("name", CASES)
def test_calls_and_operations(name: str) -> None:
    *_, most_calls, most_operations = CASES[name]
    (calls, operations), deeper = counts(name, 6, 1), counts(name, 6, 2)
    assert calls <= most_calls
    assert operations <= most_operations
    assert deeper[0] - calls <= CALLS_A_LAYER
    assert deeper[1] - operations <= OPERATIONS_A_LAYER
    # One more for each row would be seen.
    assert counts(name, 12, 1) == (calls, operations)


def test_bytes() -> None:
    """Of six more rows, each way."""

    def moved(rows: int) -> tuple[int, int, int]:
        sent = policy_rows(rows).on_wire()
        module = HeadedLM(model("llama", num_hidden_layers=1))
        tensors = as_tensors(sent)
        arrived = tensors.map(lambda tensor: tensor.numpy()).num_bytes
        with torch.no_grad():
            scores = as_arrays(PPOObjective(PPOStageConfig()).score(module, tensors))
        return sent.num_bytes, arrived, scores.num_bytes

    # Ten ids of 8 bytes, five numbers of 4 for each of four reply tokens; two numbers, and an offset a ragged column.
    sent = 10 * 8 + 2 * 8 + 5 * 4 * 4 + 6 * 8
    assert np.subtract(moved(12), moved(6)).tolist() == [6 * sent, 6 * (sent + 8), 6 * (2 * 4 * 4 + 2 * 8)]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_two_are_in_their_passes_at_the_same_time(
    name: str, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that both need would let the first pass end before the second begins."""
    objective, made, *_ = CASES[name]
    module = HeadedLM(model("llama", num_hidden_layers=1), scalar_head=name in ("reward", "critic"))
    met, hidden = threading.Barrier(2), HeadedLM.hidden

    def meeting(*args: Any) -> Any:
        met.wait(30)  # broken if the other is not here
        return hidden(*args)

    monkeypatch.setattr(HeadedLM, "hidden", meeting)
    totals, batch = StepTotals(tokens=1.0, rows=1.0), as_tensors(made(4))
    passes = in_threads(lambda number: training_loss(module, objective(), batch, totals).loss.item(), range(2))
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
