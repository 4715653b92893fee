"""From a scored rollout to what the update needs: rewards, advantages, returns, importance weights.

Everything here is computed over the *whole* rollout, so nothing depends on how the update is split afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from xray_runtime.algorithms.advantages import gae, masked_mean, place_rewards, whiten
from xray_runtime.algorithms.importance import importance_weights
from xray_runtime.algorithms.kl import kl_estimate, kl_summary
from xray_runtime.algorithms.moments import RunningMoments
from xray_runtime.algorithms.statistics import explained_variance
from xray_runtime.config.ppo import PPOStageConfig
from xray_runtime.workers.rows import Rows


@dataclass(frozen=True)
class Experience:
    """One rollout ready for updates."""

    rows: Rows
    """`input_ids`, `prompt_lengths`, `lengths`, `id`, and per response token [B, T] `old_logprobs`, `values`,
    `advantages`, `returns`, `weights`."""
    num_tokens: int
    """Response tokens in it."""
    metrics: dict[str, float]


def build_experience(
    config: PPOStageConfig,
    rows: Rows,
    rollout: Rows,
    scores: Rows,
    kl_coef: float,
    reward_summary: dict[str, float],
    moments: RunningMoments,
) -> Experience:
    """Rewards, advantages and weights of one rollout.

    Args:
        rows: prompt and reply tokens.
        rollout: the generator's `response_mask`, `rollout_logprobs` [B, T] and `ended` [B].
        scores: `logprobs`, `ref_logprobs`, `values` [B, T], `final_values`, `scores` [B].
        kl_coef: weight of the per-token penalty.
        reward_summary: the reward model's `mean` and `std` over its held-out replies.
        moments: running moments of raw scores; updated here when the config scales by them.
    """
    mask, ended = torch.from_numpy(rollout["response_mask"]), torch.from_numpy(rollout["ended"])
    logprobs, ref_logprobs, values, final_values, raw = (
        torch.from_numpy(scores[name]) for name in ("logprobs", "ref_logprobs", "values", "final_values", "scores")
    )
    rewards = _scaled(raw, config, reward_summary, moments)
    bootstrap = torch.zeros_like(final_values)
    if config.truncated == "bootstrap":
        # A cut is no terminal state: the unfinished reply earns no score; what it will be worth is the critic's guess.
        bootstrap = torch.where(ended, 0.0, final_values)
        rewards = rewards * ended
    else:
        rewards = rewards - config.truncation_penalty * (~ended)
    penalties = kl_coef * kl_estimate(logprobs, ref_logprobs, config.kl.estimator)
    token_rewards = place_rewards(rewards, penalties, mask)
    advantages, returns = gae(token_rewards, values, mask, bootstrap, gamma=config.gamma, lam=config.gae_lambda)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask)
    weights, mismatch = importance_weights(
        logprobs,
        torch.from_numpy(rollout["rollout_logprobs"]),
        mask,
        mode=config.importance_correction,
        cap=config.importance_cap,
    )
    kl = kl_summary(logprobs, ref_logprobs, mask)
    columns: dict[str, Any] = {
        "old_logprobs": logprobs,
        "values": values,
        "advantages": advantages,
        "returns": returns,
        "weights": weights,
    }
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/raw": float(raw.mean()),
        "kl/reference_k1": kl["k1"],
        "kl/reference_k3": kl["k3"],
        "value/mean": float(masked_mean(values, mask)),
        "value/return": float(masked_mean(returns, mask)),
        "value/explained_variance": explained_variance(values, returns, mask),
        "rollout/length": float(mask.sum(-1).float().mean()),
        "rollout/truncated": float((~ended).float().mean()),
        "rollout/mismatch": mismatch["mean_abs_diff"],
        "rollout/mismatch_max": mismatch["max_abs_diff"],
        "rollout/effective_sample_share": mismatch["effective_sample_share"],
        "rollout/capped_share": mismatch["capped_share"],
    }
    return Experience(
        rows | {name: column.numpy().astype("float32") for name, column in columns.items()}, int(mask.sum()), metrics
    )


def _scaled(
    raw: torch.Tensor, config: PPOStageConfig, reward_summary: dict[str, float], moments: RunningMoments
) -> torch.Tensor:
    if config.reward_scaling == "reward_model":
        scaled = (raw - reward_summary["mean"]) / reward_summary["std"]
    elif config.reward_scaling == "running":
        moments.update(raw.tolist())
        scaled = (raw - moments.mean) / moments.std
    else:
        scaled = raw
    return scaled if config.reward_clip is None else scaled.clamp(-config.reward_clip, config.reward_clip)
