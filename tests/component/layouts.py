"""Runs of one model under several layouts, compared and split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.layouts import (
    CONFIG,
    LayoutRun,
    differences,
    updates,
)
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.micro_batches import as_tensors
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models.causal_lm import load_model
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import training_loss

NUM_UPDATES = 3


def update(module: HeadedLM, optimizers: list[torch.optim.Optimizer], batches: list[TextBatch]) -> None:
    """The updates of `run_layout`, of whole batches in one pass."""
    for number in range(NUM_UPDATES):
        rows = as_tensors(batches[number % len(batches)])
        module.zero_grad()
        training_loss(module, PPOObjective(CONFIG), rows, StepTotals.of(rows)).loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CONFIG.grad_clip)
        for optimizer in optimizers:
            optimizer.step()


def in_float64(model: Path, batches: list[TextBatch]) -> dict[str, np.ndarray]:
    """Weights after the same updates by torch's AdamW, of whole batches in one pass, in float64."""
    lm: Any = load_model(model)
    if hasattr(lm.config, "num_experts"):
        lm.set_experts_implementation("eager")  # the others have no float64
    module = HeadedLM(lm, scalar_head=True).double().eval()
    optimizer = torch.optim.AdamW(module.parameters(), lr=CONFIG.lr, betas=CONFIG.betas, weight_decay=0.0)
    update(module, [optimizer], batches)
    return {name.removeprefix("lm."): p.detach().numpy() for name, p in module.named_parameters()}


def same(run: LayoutRun, alone: LayoutRun) -> None:
    """Float32 sums in another order, and Adam's divisions: 20 times what `docs/layouts.md` measured."""
    losses, norms, weights = differences(run, alone)
    assert losses < 1e-5
    assert norms < 5e-5
    assert weights < 5e-5


def part(
    learner: Learner,
    deal: Callable[[TextBatch], TextBatch],
    batches: list[TextBatch],
    span: range,
    came: Path | None,
    goes: Path | None,
) -> dict[str, Any]:
    """Some of the updates: from a snapshot, to a snapshot."""
    if came is not None:
        learner.load_state(came)
    done = updates(learner, deal, batches, span.start, span.stop)
    if goes is not None:
        learner.save_state(goes)
    return done


def short_of(names: Iterable[str], *short: str) -> list[Any]:
    """Cases of a parametrized test: all but the `short` ones are long."""
    return [pytest.param(name, marks=[] if name in short else pytest.mark.long) for name in names]


def last_line(failure: BaseException) -> str:
    """The message of the error that ended a rank, whose whole traceback `failure` has."""
    return str(failure).strip().splitlines()[-1]
