"""The loss of `distill_replies` on a tiny model in float64: its gradient, and what a graph refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import xray
from tests.message_texts import Messages
from xray_runtime.data.batch import StepTotals, TaughtBatch, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.methods.distill_replies.config import DistillRepliesConfig
from xray_runtime.methods.distill_replies.objective import DistillRepliesObjective
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import SFTObjective, training_loss
from xray_runtime.models.teacher_objective import TeacherObjective

MakeLM = Callable[[int], Any]
ROWS = TextBatch.of([[5, 9, 7], [5, 9, 7], [8, 100]], [[42, 11, 1], [3, 1], [25]])
SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}


def tensors(rows: TextBatch) -> Any:
    return rows.map(torch.from_numpy)


def taught(teacher: HeadedLM, temperature: float, top_k: int) -> TaughtBatch:
    objective = TeacherObjective(temperature, top_k, teacher.lm.config.vocab_size)
    with torch.no_grad():
        said = objective.score(teacher, tensors(ROWS))
    columns = {name: said.columns()[f"teacher_topk_{name}"] for name in ("ids", "logprobs")}
    arrays = {f"teacher_topk_{n}": Ragged(c.values.numpy(), c.offsets.numpy()) for n, c in columns.items()}  # type: ignore[union-attr]
    return ROWS.as_kind(TaughtBatch, **arrays)


def gradient(
    module: HeadedLM, objective: Any, rows: TextBatch, parts: Sequence[Sequence[int]] = ((0, 1, 2),)
) -> tuple[Tensor, float]:
    """(of all weights in one vector, the loss)."""
    module.zero_grad()
    totals, loss = StepTotals.of(rows), 0.0
    for part in parts:
        made = training_loss(module, objective, tensors(rows.take(np.array(part))), totals)
        made.loss.backward()
        loss += float(made.loss.detach())
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).clone(), loss


@pytest.mark.parametrize(("beta", "top_k"), [(0.0, 5), (0.5, 5), (1.0, None)])
def test_the_split_does_not_show_and_a_student_like_its_teacher_learns_nothing(
    make_lm: MakeLM, beta: float, top_k: int | None
) -> None:
    student, teacher = HeadedLM(make_lm(1)), HeadedLM(make_lm(2))
    config = DistillRepliesConfig(beta=beta, top_k=top_k, temperature=0.7)
    objective, count = DistillRepliesObjective(config), top_k or student.lm.config.vocab_size
    rows = taught(teacher, 0.7, count)
    whole, loss = gradient(student, objective, rows)
    split, _ = gradient(student, objective, rows, [[2], [0], [1]])
    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-12)
    assert whole.abs().max() > 1e-3
    # A mean over the reply's six tokens.
    with torch.no_grad():
        scores = objective.score(student, tensors(rows))
    assert loss == pytest.approx(float(scores.teacher_divergence.sum()) / 6, rel=1e-9)
    itself, nothing = gradient(student, objective, taught(student, 0.7, count))
    assert abs(nothing) < 1e-14
    assert itself.abs().max() < 1e-12


def test_the_loss_of_sft_is_added_with_its_weight(make_lm: MakeLM) -> None:
    student, rows = HeadedLM(make_lm(1)), taught(HeadedLM(make_lm(2)), 1.0, 5)
    alone, _ = gradient(student, DistillRepliesObjective(DistillRepliesConfig(top_k=5)), rows)
    both, _ = gradient(student, DistillRepliesObjective(DistillRepliesConfig(top_k=5, nll_coef=0.25)), rows)
    sft, _ = gradient(student, SFTObjective(), ROWS)
    # Transformers' norms compute in float32, so gradients add up to its rounding.
    torch.testing.assert_close(both - alone, 0.25 * sft, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("teachers", "fields"),
    [
        (0, {}),
        (1, {"logged": {"ids": "ids", "logprobs": "said"}}),
        (0, {"logged": {"ids": "ids", "logprobs": "other"}}),
        (1, {"top_k": 0}),
    ],
    ids=["no teacher", "both", "no such column", "top_k"],
)
def test_what_does_not_fit_is_refused(teachers: int, fields: dict[str, Any], message_texts: Messages) -> None:
    with recording():
        rows = xray.prepare(source="rows.jsonl", columns=["ids", "said"])
        student = xray.fresh_base(rows, **SIZES, name="student")
        given = {"teacher": xray.fresh_base(rows, **SIZES, name="teacher")} if teachers else {}
        with message_texts.raises(ConfigError):
            xray.distill_replies(student, data=rows, **given, **fields)
