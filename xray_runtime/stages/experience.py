"""From a scored rollout to what the update needs: rewards, advantages, returns, importance weights.

Everything here is computed over the *whole* rollout, so nothing depends on how the update is split afterwards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from xray_runtime.algorithms.advantages import masked_mean, place_rewards, whiten
from xray_runtime.algorithms.estimators import ESTIMATORS, AdvantageEstimator, AdvantageInputs, estimate
from xray_runtime.algorithms.groups import tied_groups
from xray_runtime.algorithms.importance import importance_weights
from xray_runtime.algorithms.kl import kl_estimate, kl_summary
from xray_runtime.algorithms.moments import RunningMoments
from xray_runtime.algorithms.rewards import SourceScores, lowest_where_cut, overlong_penalty, statistics, weighted_sum
from xray_runtime.algorithms.statistics import explained_variance
from xray_runtime.data.rows import Ragged, Rows, first_alike, non_finite, row_keys, take
from xray_runtime.errors import NonFiniteError

if TYPE_CHECKING:
    from xray_runtime.config.ppo import PPOStageConfig
    from xray_runtime.stages.reward_sources import RewardSources


@dataclass(frozen=True)
class Experience:
    """One rollout ready for updates."""

    rows: Rows
    """Of replies with a reward `input_ids`, `prompt_lengths`, `id`, and for each response token `old_logprobs`,
    `advantages`, `weights`, with a critic `values` and `returns`, with the KL in the loss `ref_logprobs`."""
    num_tokens: int
    """Response tokens in it."""
    metrics: dict[str, float]


def build_experience(
    config: PPOStageConfig,
    rows: Rows,
    rollout: Rows,
    scores: Rows,
    rewards: torch.Tensor,
    kl_coef: float,
    estimator: AdvantageEstimator | None = None,
) -> Experience:
    """Rewards, advantages and weights of one rollout. A reply without a reward is left out, as if it was absent.

    Args:
        rows: prompt and reply tokens.
        rollout: the generator's `rollout_logprobs` of each response token and `ended` [B]; of episodes of many turns
            also `response_mask` and `turn_rewards` of each response token (`stages.episodes`).
        scores: `logprobs` and `ref_logprobs` of each response token; of a critic `values` of each, `final_values` [B].
        rewards: of each reply [B], scaled (`scaled_rewards`); NaN where there is none.
        kl_coef: weight of the per-token penalty.
        estimator: a function of the user's; None: the built-in that `config.advantages` names.

    Raises:
        ValueError: what the user's function returned is refused.
        NonFiniteError: a reward is infinite, or what the update would read is not finite.
    """
    if rewards.isinf().any():
        raise NonFiniteError(f"{int(rewards.isinf().sum())} of {len(rewards)} rewards are infinite")
    groups = torch.arange(len(rewards)) // config.samples_per_prompt
    scored = torch.nonzero(~rewards.isnan()).squeeze(-1)
    if len(scored) < len(rewards):
        rewards, groups = rewards[scored], groups[scored].unique(return_inverse=True)[1]
        rows, rollout, scores = (take(part, scored.numpy()) for part in (rows, rollout, scores))
    ragged = (rollout["rollout_logprobs"], *(scores[name] for name in ("logprobs", "ref_logprobs")))
    # Advantages run over all replies at a time, from their last tokens to their first: here alone rows are padded.
    rollout_logprobs, logprobs, ref_logprobs = (torch.from_numpy(column.dense()) for column in ragged)
    there, offsets = torch.from_numpy(ragged[0].mask()), ragged[0].offsets
    # Of an episode of many turns only what the policy chose counts, not what it read in between.
    mask = torch.from_numpy(rollout["response_mask"].dense()) if "response_mask" in rollout else there
    ended, has_critic = torch.from_numpy(rollout["ended"]), config.critic_in_use != "none"
    values, bootstrap = torch.zeros_like(logprobs), torch.zeros_like(rewards)
    if has_critic:
        values = torch.from_numpy(scores["values"].dense())
    if config.truncated == "bootstrap":
        # A cut is no terminal state: the unfinished reply earns no score; what it will be worth is the critic's guess.
        bootstrap = torch.where(ended, 0.0, torch.from_numpy(scores["final_values"]))
        rewards = rewards * ended
    elif config.truncated == "lowest":
        rewards = lowest_where_cut(rewards, ended)
    else:
        rewards = rewards - config.truncation_penalty * (~ended)
    if config.overlong_buffer is not None:
        rewards = rewards + overlong_penalty(mask.sum(-1), config.max_new_tokens, config.overlong_buffer)
    in_reward = kl_coef if config.kl.place == "reward" else 0.0
    penalties = in_reward * kl_estimate(logprobs, ref_logprobs, config.kl.estimator)
    by_turn = torch.zeros_like(logprobs)
    if "turn_rewards" in rollout:
        by_turn = torch.from_numpy(rollout["turn_rewards"].dense())
    # Equal replies get one KL: differences in the last bits would be amplified by the group's deviation.
    alike = torch.from_numpy(first_alike(row_keys(rows)))
    inputs = AdvantageInputs(
        scores=rewards - (penalties * mask).sum(-1)[alike],
        # Rewards of no single turn, from other sources or for a cut, come with the last token.
        rewards=place_rewards(rewards - by_turn.sum(-1), penalties, mask) + by_turn,
        mask=mask,
        groups=groups,
        values=values,
        bootstrap_values=bootstrap,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda if has_critic else 1.0,
    )
    advantages, returns = estimate(estimator or ESTIMATORS[config.advantages], inputs, config.advantages)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask)
    weights, mismatch = importance_weights(
        logprobs,
        rollout_logprobs,
        mask,
        mode=config.importance_correction,
        cap=config.importance_cap,
        level=config.importance_level,
    )
    kl = kl_summary(logprobs, ref_logprobs, mask)
    columns = {"old_logprobs": logprobs, "advantages": advantages, "weights": weights}
    if has_critic:
        columns |= {"values": values, "returns": returns}
    if config.kl.place == "loss":
        columns["ref_logprobs"] = ref_logprobs
    metrics = {
        "reward/mean": float(rewards.mean()),
        # In float64 equal rewards deviate by 0, and the summary says that there was nothing to learn.
        "reward/std": float(rewards.double().std(correction=0)),
        "kl/reference_k1": kl["k1"],
        "kl/reference_k3": kl["k3"],
        "rollout/length": float(mask.sum(-1).float().mean()),
        "rollout/truncated": float((~ended).float().mean()),
        "rollout/mismatch": mismatch["mean_abs_diff"],
        "rollout/mismatch_max": mismatch["max_abs_diff"],
        "rollout/effective_sample_share": mismatch["effective_sample_share"],
        "rollout/capped_share": mismatch["capped_share"],
    }
    if has_critic:
        metrics |= {
            "value/mean": float(masked_mean(values, mask)),
            "value/return": float(masked_mean(returns, mask)),
            "value/explained_variance": explained_variance(values, returns, mask),
        }
    if config.samples_per_prompt > 1:
        metrics["rollout/tied_groups"] = float(tied_groups(rewards, groups).float().mean())
    made = {name: Ragged(column[there].float().numpy(), offsets) for name, column in columns.items()}
    if "response_mask" in rollout:
        made["response_mask"] = rollout["response_mask"]
    wrong = non_finite(made)
    if wrong is not None:
        raise NonFiniteError(f"the experience: {wrong} are not finite")
    return Experience(rows | made, int(mask.sum()), metrics)


def scaled_rewards(
    config: PPOStageConfig, rewards: RewardSources, sources: SourceScores, moments: RunningMoments
) -> torch.Tensor:
    """The reward of each reply [B] by `config.reward_scaling`, clipped; NaN where there is none.

    Args:
        moments: running moments of the weighted sum; updated here when the config scales by them.
    """
    raw = weighted_sum(sources, rewards.weights)
    if config.reward_scaling == "reward_model":
        scaled = rewards.scaled(sources)
    elif config.reward_scaling == "running":
        moments.update(raw[~raw.isnan()].tolist())
        scaled = (raw - moments.mean) / moments.std
    else:
        scaled = raw
    return scaled if config.reward_clip is None else scaled.clamp(-config.reward_clip, config.reward_clip)


def reward_metrics(rewards: RewardSources, sources: SourceScores) -> dict[str, float]:
    """Mean of the raw reward, how many replies have none, and what each source gave by itself."""
    raw = weighted_sum(sources, rewards.weights)
    metrics = {"reward/raw": float(raw.nanmean()), "reward/failed": float(raw.isnan().sum())}
    for source, numbers in statistics(sources).items():
        metrics |= {f"reward/source/{metric_name(source)}/{key}": value for key, value in numbers.items()}
    return metrics


def metric_name(source: str) -> str:
    """A source of reward as metrics call it: MLflow takes few signs, and a function's name has colons and brackets."""
    return re.sub(r"[^\w. -]", ".", source)
