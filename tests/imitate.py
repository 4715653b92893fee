"""A stage kind of one's own with two models: a student is trained on the replies that a frozen teacher finds likeliest.

In a module of its own, since importing it registers the kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import xray
from xray.data import TRAIN
from xray_runtime.methods.sft.config import SFTConfig


class ImitateConfig(SFTConfig):
    """That of `sft`, with the teacher's layout."""

    frozen: xray.FrozenConfig = xray.FrozenConfig()


@dataclass(frozen=True)
class ImitateInputs:
    student: xray.Model
    teacher: xray.Model
    data: xray.Dataset


def imitate_models(config: ImitateConfig) -> dict[str, xray.ModelRole]:
    return {
        "student": xray.trained(config, "student", batch_size=config.batch_size, data="data", reply_tokens=64),
        "teacher": xray.frozen(config.frozen, "teacher", data="data", reply_tokens=64),
    }


@xray.stage_kind("imitate", config=ImitateConfig, inputs=ImitateInputs, output=xray.Model, models=imitate_models)
def imitate(stage: xray.Stage[ImitateConfig, ImitateInputs], out: Path, recorder: xray.Recorder) -> int:
    """Each step the teacher scores a batch, and the student learns the likelier half of it."""
    from xray_runtime.algorithms.schedules import learning_rate
    from xray_runtime.cluster.model_spec import ModelSpec
    from xray_runtime.cluster.protocols import get
    from xray_runtime.data.batch import StepTotals
    from xray_runtime.data.batching import Cursor
    from xray_runtime.data.conversations import ConversationTokens
    from xray_runtime.kernel.seeding import derive_seed
    from xray_runtime.methods.common.training.dataset import max_prompt_tokens
    from xray_runtime.methods.common.training.resumable import Resumable
    from xray_runtime.methods.common.training.steps import read_step
    from xray_runtime.models.causal_lm import load_tokenizer
    from xray_runtime.models.objectives import SFTObjective

    config, student, data = stage.config, stage.inputs.student.path, stage.inputs.data.path
    limits = max_prompt_tokens(data, student, 64), 64
    rows = ConversationTokens(data / TRAIN, load_tokenizer(student), *limits, stage.seal)
    cursor = Cursor(len(rows), derive_seed(stage.seed, stage.name, "order"))
    specs = {
        "student": ModelSpec(student, SFTObjective(), training=config),
        "teacher": ModelSpec(stage.inputs.teacher.path, SFTObjective(), frozen=config.frozen),
    }
    with stage.open_models(specs) as models:
        state = Resumable(recorder, {"student": models["student"]}, cursor=cursor)
        for step in range(state.restore(), config.steps):
            batch = rows.take(cursor.take(config.batch_size))
            nll = get(models["teacher"].score.remote(batch)).nll
            likely = batch.take(np.argsort(nll, kind="stable")[: max(len(nll) // 2, 1)])
            tokens = likely.num_response_tokens()
            totals, lr = StepTotals.of(likely), learning_rate(config, step, config.steps)
            made = read_step(get(models["student"].train.remote(likely, totals, lr)))
            recorder.metrics({"imitate/loss": made.sums["nll"] / tokens}, step)
            recorder.progress(step + 1, config.steps, "steps")
            state.step_done(step + 1, config.steps)
        get(models["student"].save.remote(out))
    return config.steps
