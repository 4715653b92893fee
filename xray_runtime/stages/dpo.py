"""Stage `dpo`: a policy that learns from preference pairs, without a reward model and without sampling.

The reference scores all replies once, before the first step: it never lives beside the policy, so it needs no memory of
its own, nor a branch on a frozen trunk. Where the policy as it begins is the reference, it is the model that scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from xray_runtime.algorithms.preference_losses import implicit_rewards, pair_losses
from xray_runtime.data.batching import Cursor
from xray_runtime.data.pairs import HELDOUT, TRAIN, PreferenceExample
from xray_runtime.data.replies import Replies, both_sides
from xray_runtime.data.rows import Rows
from xray_runtime.data.tokens import Tokens
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.models.preference_objectives import DPOObjective
from xray_runtime.seeding import derive_seed
from xray_runtime.stages.common import lr_at, tokenizing
from xray_runtime.stages.reference_logprobs import ReferenceLogprobs
from xray_runtime.stages.resumable import Resumable
from xray_runtime.workers.model_spec import ModelSpec
from xray_runtime.workers.protocols import ModelHandle, get

if TYPE_CHECKING:
    from xray_runtime.config.dpo import DPOConfig
    from xray_runtime.stages.kind import Recorder, Stage
    from xray_runtime.stages.kinds import DPOInputs

HELDOUT_PAIRS = 256
"""Held-out pairs behind the reported held-out loss and accuracy."""


def run(stage: Stage[DPOConfig, DPOInputs], out: Path, recorder: Recorder) -> int:
    """Writes the policy in Hugging Face form."""
    config, start, dataset = stage.config, stage.inputs.policy.path, stage.inputs.preferences.path
    reference = stage.inputs.reference.path if stage.inputs.reference is not None else start
    tokenizer = load_tokenizer(start)
    train, heldout = (
        Tokens(dataset / side, PreferenceExample, tokenizer, tokenizing(recorder)) for side in (TRAIN, HELDOUT)
    )
    parts = {TRAIN: both_sides(train), HELDOUT: both_sides(heldout, HELDOUT_PAIRS)}
    steps = max(1, config.epochs * len(train) // config.batch_size)
    cursor = Cursor(len(train), derive_seed(stage.seed, stage.name, "order"))
    kept = ReferenceLogprobs(stage, dataset, reference, parts, recorder) if config.has_reference else None
    known = kept.load() if kept is not None else None
    if kept is not None and known is None and reference != start:
        with stage.open_models({"policy": _model(stage, reference)}) as models:
            known = kept.compute(models["policy"])

    with stage.open_models({"policy": _model(stage, start)}) as models:
        policy = models["policy"]
        if kept is not None and known is None:
            known = kept.compute(policy)
        state = Resumable(recorder, models, cursor=cursor)
        for step in range(state.restore(), steps):
            index = np.array(cursor.take(config.batch_size))
            lr = lr_at(config, step, steps)
            stats = get(policy.train.remote(_batch(train, index, known), {"pairs": config.batch_size}, lr))
            metrics = {
                "dpo/loss": stats["loss"] / config.batch_size,
                "dpo/accuracy": stats["correct"] / config.batch_size,
                "dpo/margin": stats["margin"] / config.batch_size,
                "dpo/chosen_logprobs": stats["chosen_logprobs"] / config.batch_size,
                "dpo/rejected_logprobs": stats["rejected_logprobs"] / config.batch_size,
                "dpo/grad_norm": stats["grad_norm"],
                "dpo/lr": lr,
            }
            if step + 1 == steps or step % max(steps // 8, 1) == 0:
                metrics |= _heldout(policy, config, parts[HELDOUT], known)
            recorder.metrics(metrics, step)
            recorder.progress(step + 1, steps, "steps", f"accuracy {metrics['dpo/accuracy']:.2f}")
            state.step_done(step + 1, steps)
        get(policy.save.remote(out))
    return steps


def _model(stage: Stage[DPOConfig, DPOInputs], directory: Path) -> ModelSpec:
    config = stage.config
    return ModelSpec(
        directory,
        DPOObjective(config),
        training=config,
        trainable_layers=config.trainable_layers,
        adapter_seed=derive_seed(stage.seed, stage.name, "adapters"),
    )


def _batch(pairs: Tokens, index: np.ndarray, known: dict[str, np.ndarray] | None) -> Rows:
    """Both replies of each pair in one row, so that they meet in one micro-batch."""
    rows = pairs.take(index)
    if known is not None:
        rows |= {"ref_chosen": known[TRAIN][2 * index], "ref_rejected": known[TRAIN][2 * index + 1]}
    return rows


def _heldout(
    policy: ModelHandle, config: DPOConfig, replies: Replies, known: dict[str, np.ndarray] | None
) -> dict[str, float]:
    """What the loss says of held-out pairs, after the step."""
    rows = replies.take(np.arange(replies.size))
    logprobs = torch.tensor(get(policy.score.remote(rows))["logprobs"]).double()
    reference = torch.tensor(known[HELDOUT]).double() if known is not None else None
    num_tokens = torch.from_numpy(rows["input_ids"].lengths - rows["prompt_lengths"])
    rewards = implicit_rewards(logprobs, reference, num_tokens, config.loss, config.beta)
    chosen, rejected = rewards[::2], rewards[1::2]
    losses = pair_losses(
        chosen,
        rejected,
        config.loss,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        gamma=config.gamma,
    )
    right = (chosen > rejected).double() + 0.5 * (chosen == rejected)
    return {
        "dpo/heldout_loss": float(losses.mean()),
        "dpo/heldout_accuracy": float(right.mean()),
        "dpo/heldout_margin": float((chosen - rejected).mean()),
    }
