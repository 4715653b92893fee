"""The path of a reply to its gradient, on a real tiny model: what the page says is what autograd gives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.methods.ppo.method_setting import KL_COEF, REWARDS, MakeLM, Setting, as_tensors
from xray_runtime.cluster.micro_batches import as_arrays
from xray_runtime.cluster.protocols import Ready
from xray_runtime.data.batch import PolicyBatch, Scores, StepTotals
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.methods.ppo.update import step_totals
from xray_runtime.models.objectives import training_loss
from xray_runtime.trust.iteration.sample import SamplePath, only
from xray_runtime.trust.iteration.updates import UpdateNumbers

ROW = 2
METHODS = ["ppo", "grpo", "dr_grpo", "gspo", "reinforce++"]


class InProcess:
    """A trained model whose steps change nothing, so that there is no state to put back."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.calls: list[str] = []
        self.train, self.score = SimpleNamespace(remote=self._train), SimpleNamespace(remote=self._score)
        self.save_state = SimpleNamespace(remote=lambda directory: self._note("save"))
        self.load_state = SimpleNamespace(remote=lambda directory: self._note("load"))

    def _note(self, call: str) -> Ready[None]:
        self.calls.append(call)
        return Ready(None)

    def _train(self, rows: PolicyBatch, totals: StepTotals, lr: float) -> Ready[dict[str, float]]:
        self._note("train")
        return Ready({"grad_norm": float(self._setting.gradient(rows, totals).norm())})

    def _score(self, rows: PolicyBatch) -> Ready[Scores]:
        with torch.no_grad():
            return Ready(as_arrays(PPOObjective(self._setting.config).score(self._setting.module, as_tensors(rows))))


@pytest.mark.parametrize("method", METHODS)
def test_a_reply_and_the_others_make_up_the_gradient(make_lm: MakeLM, tmp_path: Path, method: str) -> None:
    setting = Setting(make_lm, method)
    rows, _ = setting.experience(REWARDS)
    totals, own = step_totals(setting.config, rows, KL_COEF), rows.id == ROW
    whole = setting.gradient(rows, totals)
    # Without the other rows, and not by their masks.
    alone, others = setting.gradient(rows.take(np.array([ROW])), totals), setting.gradient(only(rows, ~own), totals)
    torch.testing.assert_close(setting.gradient(only(rows, own), totals), alone)
    torch.testing.assert_close(alone + others, whole)

    path, policy = SamplePath(ROW, tmp_path), InProcess(setting)
    path.policy, path.objective = policy, PPOObjective(setting.config)  # type: ignore[assignment]
    path.before(3, rows, totals, 1e-4)
    numbers = [{"grad_norm": "nan"}] * 3 + [{"grad_norm": repr(float(whole.norm()))}]
    path.end(UpdateNumbers(steps={"policy": numbers}, weights={}, moments={}))
    assert policy.calls == ["save", "train", "load", "train", "load"], "each from the state before the step"
    [step] = path.steps
    assert (step.number, step.rows) == (3, 8)
    assert step.norm == pytest.approx(float(alone.norm()))
    assert step.cosine == pytest.approx(float(torch.cosine_similarity(alone, whole, 0)), abs=1e-6)
    assert step.share == pytest.approx(float(alone @ whole / whole.norm() ** 2), abs=1e-6)
    loss, _ = training_loss(setting.module, path.objective, as_tensors(rows.take(np.array([ROW]))), totals)
    assert step.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert {len(values) for values in step.losses.values()} == {len(step.logprobs)}


def test_the_shares_of_all_replies_sum_to_one(make_lm: MakeLM, tmp_path: Path) -> None:
    setting = Setting(make_lm, "grpo")
    rows, _ = setting.experience(REWARDS)
    totals = step_totals(setting.config, rows, KL_COEF)
    norm = repr(float(setting.gradient(rows, totals).norm()))
    shares: list[Any] = []
    for row in range(8):
        path = SamplePath(row, tmp_path)
        path.policy, path.objective = InProcess(setting), PPOObjective(setting.config)  # type: ignore[assignment]
        path.before(0, rows, totals, 1e-4)
        path.end(UpdateNumbers(steps={"policy": [{"grad_norm": norm}]}, weights={}, moments={}))
        shares += [step.share or 0.0 for step in path.steps]
    assert len(shares) == 8
    assert sum(shares) == pytest.approx(1.0, abs=1e-5)


def test_a_minibatch_without_the_reply_is_left_alone(make_lm: MakeLM, tmp_path: Path) -> None:
    setting = Setting(make_lm, "grpo")
    rows, _ = setting.experience(REWARDS)
    path, policy = SamplePath(99, tmp_path), InProcess(setting)
    path.policy = policy  # type: ignore[assignment]
    path.before(0, rows, step_totals(setting.config, rows, KL_COEF), 1e-4)
    assert (path.steps, policy.calls) == ([], [])
