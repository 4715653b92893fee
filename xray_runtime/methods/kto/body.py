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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from xray_runtime.algorithms.preference_losses import kto_baseline
from xray_runtime.algorithms.statistics import wins
from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import LabelledBatch, StepTotals, TextBatch
from xray_runtime.data.batching import Cursor
from xray_runtime.data.heldout import draw_left_out, held_out_prompts, refuse_held
from xray_runtime.data.pairs import HELDOUT, TRAIN, prompt_text
from xray_runtime.data.replies import SIDES, Replies, both_sides, encoded, from_verdicts, joined, mismatched, within
from xray_runtime.kernel.graph.artifacts import VERDICTS
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.preference_objectives import Desirability, KTOObjective
from xray_runtime.methods.common.training.dataset import (
    check_longest,
    fitting_prompts,
    preference_tokens,
)
from xray_runtime.methods.common.training.loop import Method, Trained, training_loop
from xray_runtime.methods.common.training.policy_versions import BestVersion
from xray_runtime.methods.common.training.reference_logprobs import ReferenceLogprobs, open_policy
from xray_runtime.methods.common.training.trained_model import trained_model
from xray_runtime.models.causal_lm import load_tokenizer, max_positions

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.data.tokenizer import Tokenizer
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.kto.config import KTOConfig
    from xray_runtime.methods.kto.kind import KTOInputs

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
    parts, desirable, prompts, counts = _data(stage, load_tokenizer(inputs.policy.path), out, recorder)
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
    with open_policy(stage, objective, reference) as (policy, known):
        assert known is not None
        counts = {f"kto/{name}": count for name, count in counts.items()}
        method = _KTO(config, policy, parts, known, desirable, trained, chosen_by, counts)
        models = {"policy": policy}
        training_loop(stage, recorder, method, models, cursor, steps, best)
        return best.save(models, out, steps, {"replies": len(chosen_by)})


@dataclass(frozen=True)
class _KTO(Method):
    """Labelled replies, for `training_loop`."""

    config: KTOConfig
    policy: ModelHandle
    parts: Mapping[str, Replies]
    known: Mapping[str, np.ndarray]
    """Part → log-probability of each of its replies under the reference."""
    desirable: np.ndarray
    """Whether each training reply is [N]."""
    trained: np.ndarray
    """Numbers of the replies to train on."""
    chosen_by: np.ndarray
    """Numbers of the replies that `validation` leaves out."""
    counts: dict[str, float]
    name = "kto"
    asks_model = True

    def batch(self, index: np.ndarray) -> tuple[TextBatch, StepTotals]:
        numbers = self.trained[index]
        baseline = kto_baseline(self._ratios(MISMATCHED, numbers))
        labels = {"ref_reply_logprobs": self.known[TRAIN][numbers], "desirable": self.desirable[numbers]}
        rows = self.parts[TRAIN].take(numbers).as_kind(LabelledBatch, **labels)
        return rows, StepTotals.of(rows, baseline=baseline)

    def metrics(self, step: Trained) -> dict[str, float]:
        sums, desirable = step.result.sums, self.desirable[self.trained[step.index]]
        metrics = {"kto/loss": sums["loss"] / len(desirable), "kto/baseline": step.totals.baseline}
        if desirable.any():
            metrics["kto/desirable_reward"] = sums["desirable_rewards"] / desirable.sum()
        if not desirable.all():
            metrics["kto/undesirable_reward"] = sums["undesirable_rewards"] / (~desirable).sum()
        return metrics

    def first_metrics(self) -> dict[str, float]:
        return self.counts

    def heldout(self) -> dict[str, float]:
        if HELDOUT not in self.parts:
            return {}
        pairs = self._ratios(HELDOUT, np.arange(self.parts[HELDOUT].size))
        return {"kto/heldout_accuracy": float(wins(*pairs.reshape(-1, 2).T).mean())}

    def validate(self) -> tuple[dict[str, float], float]:
        z = kto_baseline(self._ratios(MISMATCHED, self.chosen_by))
        ratios = self._ratios(TRAIN, self.chosen_by)
        good = torch.from_numpy(self.desirable[self.chosen_by])
        loss = float(Desirability(self.config).of_replies(ratios, good, z).mean())
        return {"kto/validation_loss": loss, "kto/validation_accuracy": _accuracy(ratios, good, z)}, -loss

    def summary(self, metrics: Mapping[str, float]) -> str:
        return f"loss {metrics['kto/loss']:.3f}"

    def _ratios(self, part: str, numbers: np.ndarray) -> torch.Tensor:
        """Current log-ratios of some replies of a part [len(numbers)]."""
        logprobs = get(self.policy.score.remote(self.parts[part].take(numbers))).reply_logprobs
        return torch.from_numpy(logprobs - self.known[part][numbers])


def _data(
    stage: Stage[KTOConfig, KTOInputs], tokenizer: Tokenizer, out: Path, recorder: Recorder
) -> tuple[dict[str, Replies], np.ndarray, Iterator[str], dict[str, float]]:
    """(replies by part, whether each training reply is desirable [N], prompt of each training reply, counts)."""
    inputs, context = stage.inputs, max_positions(stage.inputs.policy.path)
    sources: list[Replies] = []
    labels: list[np.ndarray] = []
    prompts: list[Iterable[str]] = []
    counts: dict[str, float] = {}
    parts: dict[str, Replies] = {}
    if inputs.preferences is not None:
        train, heldout = preference_tokens(stage, inputs.preferences.path, tokenizer, out, recorder, inputs.policy.path)
        model = trained_model(stage, inputs.policy.path, KTOObjective(stage.config))
        check_longest(stage, model, train.longest(), train.id)
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


def _accuracy(ratios: torch.Tensor, desirable: torch.Tensor, baseline: float) -> float:
    """Share of desirable replies with a log-ratio above z and of others below it; ties count half."""
    z = torch.full_like(ratios, baseline)
    return float(torch.where(desirable, wins(ratios, z), wins(z, ratios)).mean())
