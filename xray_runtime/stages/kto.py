"""Stage `kto`: a policy that learns from replies of which each is desirable or not (Ethayarajh et al. 2024).

Replies come from preference pairs, and from people's verdicts, where both of two may be good, or bad. The loss holds
each against z, the mean log-ratio of replies under prompts that are not theirs. It is computed once a step, over all
rows and ranks, with the policy as it is before the step. Which reply stands under which prompt is settled for the whole
stage: each prompt gets the next reply of a seeded order, so the reference scores those once too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xray_runtime.algorithms.preference_losses import kto_baseline
from xray_runtime.algorithms.statistics import wins
from xray_runtime.data.batching import Cursor
from xray_runtime.data.heldout import held_out_prompts
from xray_runtime.data.pairs import HELDOUT, TRAIN, PreferenceExample
from xray_runtime.data.replies import Replies, both_sides, encoded, from_verdicts, joined, mismatched
from xray_runtime.data.tokens import Tokens
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.models.preference_objectives import KTOObjective
from xray_runtime.seeding import derive_seed
from xray_runtime.stages.artifacts import VERDICTS
from xray_runtime.stages.common import lr_at, tokenizing
from xray_runtime.stages.finite import SkippedSteps
from xray_runtime.stages.reference_logprobs import ReferenceLogprobs, open_policy
from xray_runtime.stages.resumable import Resumable
from xray_runtime.workers.protocols import ModelHandle, get

if TYPE_CHECKING:
    from xray_runtime.config.kto import KTOConfig
    from xray_runtime.stages.inputs import KTOInputs
    from xray_runtime.stages.kind import Recorder, Stage

HELDOUT_PAIRS = 256
MISMATCHED = "mismatched"
"""Part of the reference's scores: each prompt with another's reply."""


def run(stage: Stage[KTOConfig, KTOInputs], out: Path, recorder: Recorder) -> int:
    """Writes the policy in Hugging Face form.

    Raises:
        ValueError: fewer than two replies are left.
    """
    config, inputs = stage.config, stage.inputs
    parts, desirable, counts = _data(stage, load_tokenizer(inputs.policy.path), recorder)
    train = parts[TRAIN]
    beside = inputs.preferences or inputs.verdicts
    assert beside is not None
    steps = max(1, config.epochs * train.size // config.batch_size)
    cursor = Cursor(train.size, derive_seed(stage.seed, stage.name, "order"))
    reference = ReferenceLogprobs(stage, beside.path, parts, recorder)
    with open_policy(stage, KTOObjective(config), reference) as (policy, known):
        assert known is not None
        skipped = SkippedSteps()
        state = Resumable(recorder, {"policy": policy}, cursor=cursor, skipped=skipped)
        done = state.restore()
        if not done:
            recorder.metrics({f"kto/{name}": count for name, count in counts.items()}, step=0)
        for step in range(done, steps):
            index = np.array(cursor.take(config.batch_size))
            lr = lr_at(config, step, steps)
            others = get(policy.score.remote(parts[MISMATCHED].take(index)))["logprobs"]
            baseline = kto_baseline(torch.tensor(others - known[MISMATCHED][index]))
            rows = train.take(index) | {"ref_logprobs": known[TRAIN][index], "desirable": desirable[index]}
            stats = get(policy.train.remote(rows, {"rows": config.batch_size, "baseline": baseline}, lr))
            skipped.took(stage, "policy", step, stats)
            metrics = {
                "kto/loss": stats["loss"] / config.batch_size,
                "kto/baseline": baseline,
                "kto/grad_norm": stats["grad_norm"],
                "kto/lr": lr,
            }
            for name, num in (("desirable", desirable[index].sum()), ("undesirable", (~desirable[index]).sum())):
                if num:
                    metrics[f"kto/{name}_reward"] = stats[f"{name}_rewards"] / num
            if HELDOUT in parts and (step + 1 == steps or step % max(steps // 8, 1) == 0):
                metrics["kto/heldout_accuracy"] = _accuracy(policy, parts[HELDOUT], known[HELDOUT])
            recorder.metrics(skipped.metrics(metrics), step)
            recorder.progress(step + 1, steps, "steps", f"loss {metrics['kto/loss']:.3f}")
            state.step_done(step + 1, steps)
        get(policy.save.remote(out))
    return steps


def _data(
    stage: Stage[KTOConfig, KTOInputs], tokenizer: Any, recorder: Recorder
) -> tuple[dict[str, Replies], np.ndarray, dict[str, float]]:
    """(what is trained on, mismatched, and held out; which of the first are desirable [N]; counts)."""
    inputs = stage.inputs
    sources: list[Replies] = []
    labels: list[np.ndarray] = []
    counts: dict[str, float] = {}
    parts: dict[str, Replies] = {}
    if inputs.preferences is not None:
        train, heldout = (
            Tokens(inputs.preferences.path / side, PreferenceExample, tokenizer, tokenizing(recorder))
            for side in (TRAIN, HELDOUT)
        )
        sources.append(both_sides(train))
        labels.append(np.arange(2 * len(train)) % 2 == 0)
        parts[HELDOUT] = both_sides(heldout, HELDOUT_PAIRS)
    if inputs.verdicts is not None:
        assert inputs.data is not None
        held_out = held_out_prompts(inputs.data.path)
        with (inputs.verdicts.path / VERDICTS).open(encoding="utf-8") as lines:
            found, counts = from_verdicts(map(json.loads, lines), held_out)
        sources.append(encoded(found, tokenizer))
        labels.append(np.array([one.desirable for one in found], dtype=bool))
    replies, desirable = joined(sources), np.concatenate(labels)
    if replies.size < 2:
        raise ValueError(f"{stage.name}: {replies.size} replies are too few, must be at least 2 (left out: {counts})")
    parts |= {TRAIN: replies, MISMATCHED: mismatched(replies, derive_seed(stage.seed, stage.name, "mismatched"))}
    good = float(desirable.sum())
    return parts, desirable, counts | {"desirable": good, "undesirable": replies.size - good}


def _accuracy(policy: ModelHandle, replies: Replies, reference: np.ndarray) -> float:
    """Share of held-out pairs whose chosen reply has the higher log-ratio; ties half."""
    logprobs = get(policy.score.remote(replies.take(np.arange(replies.size))))["logprobs"]
    chosen, rejected = torch.from_numpy(logprobs - reference).reshape(-1, 2).T
    return float(wins(chosen, rejected).mean())
