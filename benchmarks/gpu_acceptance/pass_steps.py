"""Steps about one pass: where its time goes, and prompts that several rows share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_acceptance.generation_steps import MISMATCH
from benchmarks.gpu_acceptance.setting import Setting, check
from benchmarks.gpu_acceptance.training_steps import LR, NUM_STEPS
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.engines.layouts import FrozenConfig
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Component, Forward, Objective, ReferenceObjective, SFTObjective, Terms, Texts

SHOWN_KERNELS = 40


class BodyAlone(Component[Forward[Texts]]):
    """No logits."""

    logged = "nll"

    def terms(self, forward: Forward[Texts], totals: StepTotals) -> Terms:
        assert isinstance(forward.hidden, Tensor)
        return Terms(forward.hidden.float())


@dataclass(frozen=True)
class BodyObjective(Objective[Forward[Texts]]):
    """The body alone."""

    def components(self, module: HeadedLM) -> tuple[BodyAlone]:
        return (BodyAlone(),)


def _fastest(setting: Setting, work: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs but the first."""
    seconds = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        work()
        if setting.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def profile(setting: Setting) -> dict[str, Any]:
    """Head against body: a step with the loss and one without logits. The kernels of one step are in `profile.txt`."""
    precision = "bfloat16" if setting.device == "cuda" else "float32"
    rows, totals = setting.rows, StepTotals(tokens=float(setting.rows.num_response_tokens()))
    seconds: dict[str, float] = {}
    for name, objective in (("whole", SFTObjective()), ("body", BodyObjective())):
        with setting.learner(setting.spec(objective=objective, precision=precision, zero_stage=1)) as learner:
            seconds[name] = _fastest(setting, lambda: learner.train(rows, totals, LR))
            if name == "whole":
                busy = _profiled(setting, learner, rows, totals)
    head = max(seconds["whole"] - seconds["body"], 0.0)
    tokens = int(rows.input_ids.lengths.sum())
    return {
        "step_s": seconds["whole"],
        "head_share": head / seconds["whole"],
        "head_us_a_token": 1e6 * head / tokens,
        "body_us_a_token": 1e6 * seconds["body"] / tokens,
        "busy_share": busy / seconds["whole"],
    }


def _profiled(setting: Setting, learner: Learner, rows: TextBatch, totals: StepTotals) -> float:
    """Seconds in which the device worked, in one step."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (setting.device == "cuda")
    with torch.profiler.profile(activities=activities) as found:
        learner.train(rows, totals, LR)
        if setting.device == "cuda":
            torch.cuda.synchronize()
    by = "self_device_time_total" if setting.device == "cuda" else "self_cpu_time_total"
    averages = found.key_averages()
    table = averages.table(sort_by=by, row_limit=SHOWN_KERNELS)
    (setting.folder / "profile.txt").write_text(table, encoding="utf-8")
    return float(sum(getattr(event, by) for event in averages)) / 1e6


def shared_prompts(setting: Setting) -> dict[str, Any]:
    """Rows with the same prompt, which is computed once, score as each row by itself; and how much that saves."""
    precision: Any = "bfloat16" if setting.device == "cuda" else "float32"
    rows = setting.grouped_rows
    count = len(rows.prompt_lengths)
    spec = ModelSpec(setting.model, ReferenceObjective(1.0), frozen=FrozenConfig(precision=precision))
    with setting.learner(spec) as learner:
        together = learner.score(rows).ref_logprobs
        alone = [learner.score(rows.take([row])).ref_logprobs.values for row in range(count)]
        shared_s = _fastest(setting, lambda: learner.score(rows))
        plain_s = _fastest(setting, lambda: learner.score(setting.rows))
    off = float(np.abs(together.values - np.concatenate(alone)).mean())
    limit = MISMATCH[setting.half]
    check(off < limit, f"rows with one prompt differ by {off:.3g} nats a token from each by itself, more than {limit}")
    return {"mismatch": off, "shared_s": shared_s, "plain_s": plain_s}
