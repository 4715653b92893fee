"""Stage `dpo`: a policy that learns from preference pairs, without reward model or sampling.

The reference scores all replies once, before the first step (`reference_logprobs`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from xray_runtime.algorithms.schedules import learning_rate
from xray_runtime.cluster.protocols import ModelHandle, get
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.data.batching import Cursor
from xray_runtime.data.heldout import draw_left_out
from xray_runtime.data.pairs import HELDOUT, TRAIN
from xray_runtime.data.replies import Replies, both_sides
from xray_runtime.data.tokens import Tokens
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.preference_objectives import DPOObjective, PairPreference
from xray_runtime.methods.common.training.dataset import fitting_prompts, preference_tokens
from xray_runtime.methods.common.training.finite import SkippedSteps
from xray_runtime.methods.common.training.policy_versions import BestVersion
from xray_runtime.methods.common.training.reference_logprobs import ReferenceLogprobs, open_policy
from xray_runtime.methods.common.training.resumable import Resumable
from xray_runtime.methods.common.training.steps import DPOSums, read_step
from xray_runtime.methods.common.training.trunk_states import TrunkStates
from xray_runtime.models.causal_lm import load_tokenizer

if TYPE_CHECKING:
    from xray_runtime.cluster.stage import Stage
    from xray_runtime.kernel.graph.kind import Recorder
    from xray_runtime.methods.common.inputs import DPOInputs
    from xray_runtime.methods.dpo.config import DPOConfig

HELDOUT_PAIRS = 256
"""Number of held-out pairs for held-out loss and accuracy."""
PURPOSE = "dpo validation"
"""Seeds the choice of validation pairs."""


def run(stage: Stage[DPOConfig, DPOInputs], out: Path, recorder: Recorder) -> int:
    """Writes the policy in Hugging Face form; `validation` adds validation.json and may keep an earlier version."""
    config, validation, dataset = stage.config, stage.config.validation, stage.inputs.preferences.path
    tokenizer = load_tokenizer(stage.inputs.policy.path)
    train, heldout = preference_tokens(stage, dataset, tokenizer, recorder, stage.inputs.policy.path)
    parts = {TRAIN: both_sides(train), HELDOUT: both_sides(heldout, HELDOUT_PAIRS)}
    prompts = fitting_prompts(dataset, train) if validation is not None else ()
    wanted, where = validation.num_pairs if validation is not None else 0, f"{stage.name}.validation.num_pairs"
    left_out = draw_left_out(prompts, len(train), wanted, stage.seed, PURPOSE, where)
    trained, chosen_by = np.flatnonzero(~left_out), np.flatnonzero(left_out)
    best = BestVersion(stage.kept or recorder.log_dir, validation)
    steps = max(1, config.epochs * len(trained) // config.batch_size)
    cursor = Cursor(len(trained), derive_seed(stage.seed, stage.name, "order"))
    objective = DPOObjective(config)
    used = trained[cursor.ahead(steps * config.batch_size)]
    states = TrunkStates(stage, stage.inputs.policy.path, dataset, train, used, recorder)
    reference = ReferenceLogprobs(stage, dataset, parts, recorder) if config.has_reference else None
    with open_policy(stage, objective, reference) as (policy, known):
        states.compute(policy)
        skipped, models = SkippedSteps(), {"policy": policy}
        state = Resumable(recorder, models, [best.versions], cursor=cursor, skipped=skipped, validation=best.state)
        for step in range(state.restore(), steps):
            index = trained[cursor.take(config.batch_size)]
            lr = learning_rate(config, step, steps)
            rows = _batch(train, index, known).with_columns(**states.columns(index))
            result = read_step(DPOSums, get(policy.train.remote(rows, StepTotals.of(rows), lr)))
            skipped.check_step(stage, "policy", step, result)
            metrics = {
                "dpo/loss": result.sums.loss / config.batch_size,
                "dpo/accuracy": result.sums.correct / config.batch_size,
                "dpo/margin": result.sums.margin / config.batch_size,
                "dpo/chosen_logprobs": result.sums.chosen_logprobs / config.batch_size,
                "dpo/rejected_logprobs": result.sums.rejected_logprobs / config.batch_size,
                "dpo/grad_norm": result.grad_norm,
                "dpo/lr": lr,
                "speed/computed_tokens": result.computed_tokens,
            }
            if step + 1 == steps or step % max(steps // 8, 1) == 0:
                pairs = np.arange(parts[HELDOUT].size // 2)
                found = _without_training(policy, config, parts[HELDOUT], pairs, (known or {}).get(HELDOUT))
                metrics |= {f"dpo/heldout_{name}": value for name, value in found.items()}
            if validation is not None and validation.is_due(step + 1, steps):
                found = _without_training(policy, config, parts[TRAIN], chosen_by, (known or {}).get(TRAIN))
                metrics |= {f"dpo/validation_{name}": value for name, value in found.items()}
                best.update(models, step + 1, -found["loss"])
            recorder.metrics(skipped.metrics(metrics), step)
            recorder.progress(step + 1, steps, "steps", f"accuracy {metrics['dpo/accuracy']:.2f}")
            state.step_done(step + 1, steps)
        if validation is not None:
            return best.save(models, out, steps, {"pairs": len(chosen_by)})
        get(policy.save.remote(out))
    return steps


def _batch(pairs: Tokens, index: np.ndarray, known: dict[str, np.ndarray] | None) -> TextBatch:
    """Rows of whole pairs, so that both replies are in one micro-batch."""
    rows = pairs.take(index)
    if known is None:
        return rows
    return rows.with_columns(ref_chosen=known[TRAIN][2 * index], ref_rejected=known[TRAIN][2 * index + 1])


def _without_training(
    policy: ModelHandle, config: DPOConfig, replies: Replies, pairs: np.ndarray, reference: np.ndarray | None
) -> dict[str, float]:
    """Current loss, accuracy and margin of some pairs; replies 2i and 2i + 1 belong to pair i, `reference` is the
    log-probability of each reply."""
    # All chosen replies, then all rejected ones.
    numbers = np.concatenate([2 * pairs, 2 * pairs + 1])
    rows = replies.take(numbers)
    logprobs = torch.tensor(get(policy.score.remote(rows)).reply_logprobs).double()
    ref_logprobs = torch.tensor(reference[numbers]).double() if reference is not None else None
    num_tokens = torch.from_numpy(rows.input_ids.lengths - rows.prompt_lengths)
    losses, stats = PairPreference(config).of_pairs(logprobs, ref_logprobs, num_tokens)
    means = {"loss": losses, "accuracy": stats["correct"], "margin": stats["margin"]}
    return {name: float(values.mean()) for name, values in means.items()}
