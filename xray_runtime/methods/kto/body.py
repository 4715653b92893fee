"""Stage `kto`: a policy that learns from replies labelled desirable or undesirable (Ethayarajh et al. 2024).

Replies come from preference pairs and from human verdicts, where both of two may be good, or bad. The loss compares
each reply's log-ratio with z, the mean log-ratio of mismatched replies. z is computed once per step, over all rows and
ranks, with the policy before the step. The mismatched pairs are fixed for the whole stage: each prompt gets the next
reply of a seeded order, so the reference scores them once too.

`validation` leaves some prompts and all their replies out of training. The loss on these, with their own z, chooses
the version to keep.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xray_runtime.algorithms.preference_losses import kto_baseline
from xray_runtime.algorithms.schedules import learning_rate
from xray_runtime.algorithms.statistics import wins
from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import LabelledBatch, StepTotals
from xray_runtime.data.batching import Cursor
from xray_runtime.data.heldout import draw_left_out, held_out_prompts, refuse_held
from xray_runtime.data.pairs import HELDOUT, TRAIN, prompt_text
from xray_runtime.data.replies import SIDES, Replies, both_sides, encoded, from_verdicts, joined, mismatched, within
from xray_runtime.kernel.graph.artifacts import VERDICTS
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.preference_objectives import Desirability, KTOObjective
from xray_runtime.methods.common.training.dataset import fitting_prompts, preference_tokens
from xray_runtime.methods.common.training.finite import SkippedSteps
from xray_runtime.methods.common.training.policy_versions import BestVersion
from xray_runtime.methods.common.training.reference_logprobs import ReferenceLogprobs, open_policy
from xray_runtime.methods.common.training.resumable import Resumable
from xray_runtime.methods.common.training.steps import KTOSums, StepStatistics, read_step
from xray_runtime.methods.common.training.trunk_states import TrunkStates
from xray_runtime.models.causal_lm import load_tokenizer, max_positions

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.common.inputs import KTOInputs
    from xray_runtime.methods.kto.config import KTOConfig

HELDOUT_PAIRS = 256
PURPOSE = "kto validation"
"""Seeds the choice of validation prompts."""
MISMATCHED = "mismatched"
"""Name of the part that pairs each prompt with another prompt's reply."""


def run(stage: Stage[KTOConfig, KTOInputs], out: Path, recorder: Recorder) -> int:
    """Writes the policy in Hugging Face form; `validation` adds validation.json and may keep an earlier version.

    Raises:
        ValueError: fewer than two replies are left, or `validation` leaves none on one side.
    """
    config, inputs, validation = stage.config, stage.inputs, stage.config.validation
    parts, desirable, prompts, counts = _data(stage, load_tokenizer(inputs.policy.path), recorder)
    train = parts[TRAIN]
    source = inputs.preferences or inputs.verdicts
    assert source is not None
    wanted, where = validation.num_replies if validation is not None else 0, f"{stage.name}.validation.num_replies"
    left_out = draw_left_out(prompts, train.size, wanted, stage.seed, PURPOSE, where)
    trained, chosen_by = np.flatnonzero(~left_out), np.flatnonzero(left_out)
    best = BestVersion(stage.kept or recorder.log_dir, validation)
    steps = max(1, config.epochs * len(trained) // config.batch_size)
    cursor = Cursor(len(trained), derive_seed(stage.seed, stage.name, "order"))
    reference = ReferenceLogprobs(stage, source.path, parts, recorder)
    objective = KTOObjective(config)
    used = trained[cursor.ahead(steps * config.batch_size)]
    states, mismatched_states = (
        TrunkStates(stage, inputs.policy.path, source.path, parts[name], used, recorder) for name in (TRAIN, MISMATCHED)
    )
    with open_policy(stage, objective, reference) as (policy, known):
        assert known is not None
        states.compute(policy)
        mismatched_states.compute(policy)
        skipped, models = SkippedSteps(), {"policy": policy}
        state = Resumable(recorder, models, [best.versions], cursor=cursor, skipped=skipped, validation=best.state)
        done = state.restore()
        if not done:
            recorder.metrics({f"kto/{name}": count for name, count in counts.items()}, step=0)
        for step in range(done, steps):
            index = trained[cursor.take(config.batch_size)]
            lr = learning_rate(config, step, steps)
            baseline = kto_baseline(_ratios(policy, parts, known, MISMATCHED, index, mismatched_states))
            labels = {"ref_reply_logprobs": known[TRAIN][index], "desirable": desirable[index]}
            rows = train.take(index).as_kind(LabelledBatch, **labels, **states.columns(index))
            result = read_step(KTOSums, get(policy.train.remote(rows, StepTotals.of(rows, baseline=baseline), lr)))
            skipped.check_step(stage, "policy", step, result)
            metrics = _step_metrics(result, desirable[index]) | {"kto/baseline": baseline, "kto/lr": lr}
            if HELDOUT in parts and (step + 1 == steps or step % max(steps // 8, 1) == 0):
                pairs = _ratios(policy, parts, known, HELDOUT, np.arange(parts[HELDOUT].size))
                metrics["kto/heldout_accuracy"] = float(wins(*pairs.reshape(-1, 2).T).mean())
            if validation is not None and validation.is_due(step + 1, steps):
                z = kto_baseline(_ratios(policy, parts, known, MISMATCHED, chosen_by))
                ratios, good = _ratios(policy, parts, known, TRAIN, chosen_by), torch.from_numpy(desirable[chosen_by])
                loss = float(Desirability(config).of_replies(ratios, good, z).mean())
                metrics |= {"kto/validation_loss": loss, "kto/validation_accuracy": _accuracy(ratios, good, z)}
                best.update(models, step + 1, -loss)
            recorder.metrics(skipped.metrics(metrics), step)
            recorder.progress(step + 1, steps, "steps", f"loss {metrics['kto/loss']:.3f}")
            state.step_done(step + 1, steps)
        if validation is not None:
            return best.save(models, out, steps, {"replies": len(chosen_by)})
        get(policy.save.remote(out))
    return steps


def _data(
    stage: Stage[KTOConfig, KTOInputs], tokenizer: Any, recorder: Recorder
) -> tuple[dict[str, Replies], np.ndarray, Iterator[str], dict[str, float]]:
    """(replies by part, whether each training reply is desirable [N], prompt of each training reply, counts)."""
    inputs, context = stage.inputs, max_positions(stage.inputs.policy.path)
    sources: list[Replies] = []
    labels: list[np.ndarray] = []
    prompts: list[Iterable[str]] = []
    counts: dict[str, float] = {}
    parts: dict[str, Replies] = {}
    if inputs.preferences is not None:
        train, heldout = preference_tokens(stage, inputs.preferences.path, tokenizer, recorder, inputs.policy.path)
        sources.append(both_sides(train))
        labels.append(np.arange(2 * len(train)) % 2 == 0)
        texts = fitting_prompts(inputs.preferences.path, train)
        prompts.append(text for text in texts for _ in SIDES)
        parts[HELDOUT] = both_sides(heldout, HELDOUT_PAIRS)
    if inputs.verdicts is not None:
        assert inputs.data is not None
        refuse_held(stage.name, inputs.verdicts.path)
        held_out = held_out_prompts(inputs.data.path)
        with (inputs.verdicts.path / VERDICTS).open(encoding="utf-8") as lines:
            found, counts = from_verdicts(map(json.loads, lines), held_out)
        fit = within(found, tokenizer, context)
        if len(fit) < len(found):
            counts["dropped_too_long"] = float(len(found) - len(fit))
        found = fit
        sources.append(encoded(found, tokenizer))
        labels.append(np.array([one.desirable for one in found], dtype=bool))
        prompts.append([prompt_text(one.prompt) for one in found])
    replies, desirable = joined(sources), np.concatenate(labels)
    if replies.size < 2:
        raise ValueError(f"{stage.name}: {replies.size} replies are too few, must be at least 2 (left out: {counts})")
    seed = derive_seed(stage.seed, stage.name, "mismatched")
    parts |= {TRAIN: replies, MISMATCHED: mismatched(replies, seed, context)}
    good = float(desirable.sum())
    counts |= {"desirable": good, "undesirable": replies.size - good}
    return parts, desirable, chain.from_iterable(prompts), counts


def _step_metrics(result: StepStatistics[KTOSums], desirable: np.ndarray) -> dict[str, float]:
    """Means over the rows of a step; `desirable` is [B]."""
    metrics = {"kto/loss": result.sums.loss / len(desirable), "kto/grad_norm": result.grad_norm}
    if desirable.any():
        metrics["kto/desirable_reward"] = result.sums.desirable_rewards / desirable.sum()
    if not desirable.all():
        metrics["kto/undesirable_reward"] = result.sums.undesirable_rewards / (~desirable).sum()
    return metrics


def _ratios(
    policy: ModelHandle,
    parts: dict[str, Replies],
    known: dict[str, np.ndarray],
    part: str,
    numbers: np.ndarray,
    states: TrunkStates | None = None,
) -> torch.Tensor:
    """Current log-ratios of some replies of a part [len(numbers)]."""
    rows = parts[part].take(numbers).with_columns(**(states.columns(numbers) if states is not None else {}))
    logprobs = get(policy.score.remote(rows)).reply_logprobs
    return torch.from_numpy(logprobs - known[part][numbers])


def _accuracy(ratios: torch.Tensor, desirable: torch.Tensor, baseline: float) -> float:
    """Share of desirable replies with a log-ratio above z and of others below it; ties count half."""
    z = torch.full_like(ratios, baseline)
    return float(torch.where(desirable, wins(ratios, z), wins(z, ratios)).mean())
