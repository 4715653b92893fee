"""From a scored rollout to the rows of the update: rewards, advantages, returns, importance weights.

Everything here is computed over the *whole* rollout, so nothing depends on how the update is split afterwards.

Shapes: B replies, T response tokens of the longest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from xray_runtime.algorithms.advantages import masked_mean, place_rewards, whiten
from xray_runtime.algorithms.chosen_tokens import RolloutTokens
from xray_runtime.algorithms.distillation import teacher_advantages
from xray_runtime.algorithms.estimators import AdvantageInputs, estimate
from xray_runtime.algorithms.groups import tied_groups
from xray_runtime.algorithms.importance import importance_weights
from xray_runtime.algorithms.kl import kl_estimate, kl_summary
from xray_runtime.algorithms.rewards import MovingMeans, lowest_where_cut, overlong_penalty, weighted_sum
from xray_runtime.algorithms.statistics import explained_variance
from xray_runtime.algorithms.streams import COLUMN, TOPK
from xray_runtime.data.batch import REPLAYED, PolicyBatch, Rollout, Scores, TextBatch
from xray_runtime.data.ragged import Ragged, first_alike
from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.kernel.seeding import derive_seed
from xray_runtime.methods.common.mismatch import check_mismatch
from xray_runtime.methods.ppo.functions import Functions, RowFacts

if TYPE_CHECKING:
    from xray_runtime.algorithms.rewards import RunningMoments, SourceScores
    from xray_runtime.methods.ppo.config import PPOStageConfig
    from xray_runtime.rewards.reward_sources import RewardSources


@dataclass(frozen=True)
class Experience:
    """One rollout ready for updates."""

    rows: PolicyBatch
    num_tokens: int
    """Number of tokens that the policy sampled."""
    reference_kl: float
    """Mean KL of a reply to the reference, by k1, in nats; 0 without one."""
    metrics: dict[str, float]

    @property
    def num_rows(self) -> int:
        return len(self.rows)


def build_experience(
    config: PPOStageConfig,
    text: TextBatch,
    rollout: Rollout,
    scores: Scores,
    rewards: Tensor,
    kl_coef: float,
    functions: Functions | None = None,
    max_mismatch: float = math.inf,
    facts: RowFacts | None = None,
) -> Experience:
    """Compute rewards, advantages and weights of one rollout. Replies without a reward are left out.

    Args:
        rewards: scaled reward of each reply [B] (`scaled_rewards`); NaN if it has none.
        kl_coef: weight of the per-token penalty.
        functions: the loss and the advantages; None: the built-ins that `config` names.
        max_mismatch: of generator and trainer, see `check_mismatch`.
        facts: what functions may read of the rows beside their columns.

    Raises:
        RuntimeError: the generator does not compute the policy.
        ValueError: the user's function returned something invalid.
        NonFiniteError: a reward is infinite, or a column of the update is not finite.
    """
    if rewards.isinf().any():
        raise NonFiniteError(f"{int(rewards.isinf().sum())} of {len(rewards)} rewards are infinite")
    functions, facts = functions or Functions.of(config), facts or RowFacts()
    scored = torch.nonzero(~rewards.isnan()).squeeze(-1)
    groups = torch.unique(scored // config.samples_per_prompt, return_inverse=True)[1]
    if len(scored) < len(rewards):
        rewards, kept = rewards[scored], scored.numpy()
        text, rollout, scores = text.take(kept), rollout.take(kept), scores.take(kept)
    scores = scores if functions.scores_policy else scores.with_columns(logprobs=rollout.rollout_logprobs)
    ended, mask, has_critic = torch.tensor(rollout.ended), _mask(rollout), config.critic_in_use != "none"
    rewards, bootstrap = _final_rewards(config, rewards, ended, mask, scores)
    inputs = _advantage_inputs(config, text, rollout, scores, rewards, bootstrap, groups, kl_coef)
    streams = _streams(functions, rollout, scores, inputs, facts.moving)
    streams |= facts.streams(functions.reads, scored, ended if config.truncated == "lowest" else None)
    inputs = replace(inputs, streams={name: streams[name] for name in functions.advantage_reads})
    advantages, returns = estimate(functions.advantages, inputs, config.advantages)
    advantages = (whiten(advantages, mask) if config.whiten_advantages else advantages) + _taught(config, scores, mask)
    streams |= _chosen(functions, text, rollout, RolloutTokens(_dense(scores.logprobs), advantages, mask))
    weights, mismatch = _weights(config, scores, rollout, mask)
    rows = text.as_kind(
        PolicyBatch,
        old_logprobs=scores.logprobs if functions.scores_policy else None,
        advantages=_ragged(advantages, rollout.rollout_logprobs),
        weights=_ragged(weights, rollout.rollout_logprobs),
        values=scores.values if has_critic else None,
        returns=_ragged(returns, rollout.rollout_logprobs) if has_critic else None,
        **_read_by_loss(config, functions, rollout, scores, streams),
        **rollout.pick("response_mask", "branches", *REPLAYED),
    )
    if (wrong := rows.non_finite()) is not None:
        raise NonFiniteError(f"the experience: {wrong} are not finite")
    metrics = _experience_metrics(config, inputs, rewards, ended, returns) | _kl_metrics(scores, mask)
    metrics |= {"rollout/kept_mass": float(scores.kept_mass.values.mean())} if "kept_mass" in scores else {}
    metrics |= _mismatch_metrics(mismatch, max_mismatch) if functions.scores_policy else {}
    return Experience(rows, int(mask.sum()), metrics.get("kl/reference_k1", 0.0), metrics)


def _weights(config: PPOStageConfig, scores: Scores, rollout: Rollout, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
    """`importance_weights`, with `own_routes`, the mean difference if a trainer that replays routes chose its own."""
    mode, level = config.importance_correction, config.importance_level
    bounds = {"cap": config.importance_cap, "floor": config.importance_floor}
    logprobs, sampled = _dense(scores.logprobs), _dense(rollout.rollout_logprobs)
    weights, mismatch = importance_weights(logprobs, sampled, mask, mode=mode, level=level, **bounds)
    if "own_route_logprobs" in scores:
        own = _dense(scores.own_route_logprobs) - sampled
        mismatch["own_routes"] = float(masked_mean(own.abs(), mask))
    return weights, mismatch


def _streams(
    functions: Functions, rollout: Rollout, scores: Scores, inputs: AdvantageInputs, moving: MovingMeans
) -> dict[str, Tensor]:
    """Name → what functions may read of a rollout's columns; `moving` takes the scores in where that is read."""
    mask = inputs.mask
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    seats = rollout.seat.tolist() if "seat" in rollout else [""] * len(inputs.scores)
    return {
        "old_logprobs": _dense(scores.logprobs),
        "rollout_logprobs": _dense(rollout.rollout_logprobs),
        **{name: _dense(of) for name, of in scores.pick("ref_logprobs", "teacher_logprobs").items()},
        **{name: _dense(of) for name, of in rollout.pick(*TOPK).items() if name in functions.advantage_reads},
        "versions": _versions(rollout),
        "turns": (starts.cumsum(-1) - 1).clamp(min=0),
        "groups": inputs.groups,
        **({"seat_means": moving.take(inputs.scores, seats)} if "seat_means" in functions.advantage_reads else {}),
    }


def _chosen(functions: Functions, text: TextBatch, rollout: Rollout, tokens: RolloutTokens) -> dict[str, Tensor]:
    """The stream `chosen`, where the loss's method chooses tokens."""
    if functions.chooses is None:
        return {}
    seeds = [derive_seed(int(seed), "tokens", int(id)) for seed, id in zip(rollout.seed, text.id, strict=True)]
    return {"chosen": functions.chooses(replace(tokens, seeds=seeds))}


def _versions(rollout: Rollout) -> Tensor:
    """The version that sampled each token [B, T]."""
    if "token_versions" in rollout:
        return _dense(rollout.token_versions).long()
    return torch.from_numpy(rollout.version)[:, None].expand(-1, int(rollout.response_ids.lengths.max(initial=0)))


def _read_by_loss(
    config: PPOStageConfig, functions: Functions, rollout: Rollout, scores: Scores, streams: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The columns of the update that only its loss reads."""
    like, read = rollout.rollout_logprobs, functions.loss_reads
    found: dict[str, Any] = {name: streams[name].numpy() for name in read if name.startswith(COLUMN)}
    for name, values in found.items():
        if missing := int(np.isnan(values).sum()):
            raise ValueError(
                f"column {name.removeprefix(COLUMN)!r}: {missing} of {len(values)} rows have no number in it, which "
                "the loss reads: fill it in the dataset (advantages may read NaN there)"
            )
    found |= scores.pick("teacher_topk_ids", "teacher_topk_logprobs")
    if "rollout_logprobs" in read or not functions.scores_policy:
        found["rollout_logprobs"] = like
    if "ref_logprobs" in read or (config.has_reference and config.kl.place == "loss"):
        found["ref_logprobs"] = scores.ref_logprobs
    if config.score_centering or not read.isdisjoint(TOPK):
        found |= rollout.pick("topk_ids", "topk_logprobs")
    if "teacher_logprobs" in read:
        found["teacher_logprobs"] = scores.teacher_logprobs
    for name in {"turns", "versions", "chosen"} & read:
        found[name] = Ragged(streams[name][torch.from_numpy(like.mask())].numpy(), like.offsets)
    if "groups" in read:
        found["group"] = streams["groups"].numpy()
    return found


def _experience_metrics(
    config: PPOStageConfig, inputs: AdvantageInputs, rewards: Tensor, ended: Tensor, returns: Tensor
) -> dict[str, float]:
    """Metrics of the replies that have a reward.

    Args:
        rewards: final reward of each reply [B].
        ended: True if the reply was not cut off [B].
        returns: return of each token [B, T].
    """
    mask = inputs.mask
    metrics = {
        "reward/mean": float(rewards.mean()),
        # In float64 the deviation of equal rewards is exactly 0.
        "reward/std": float(rewards.double().std(correction=0)),
        "rollout/length": float(mask.sum(-1).float().mean()),
        "rollout/truncated": float((~ended).float().mean()),
    }
    if config.critic_in_use != "none":
        metrics |= {
            "value/mean": float(masked_mean(inputs.values, mask)),
            "value/return": float(masked_mean(returns, mask)),
            "value/explained_variance": explained_variance(inputs.values, returns, mask),
        }
    if config.samples_per_prompt > 1:
        metrics["rollout/tied_groups"] = float(tied_groups(rewards, inputs.groups).float().mean())
    return metrics


def _taught(config: PPOStageConfig, scores: Scores, mask: Tensor) -> Tensor:
    """The teacher's part of the advantages, [B, T] or 0."""
    if config.distillation is None or not (weight := config.distillation.at_samples):
        return torch.zeros(())
    mask = mask & _read(scores)
    return weight * teacher_advantages(_dense(scores.logprobs), _dense(scores.teacher_logprobs), mask)


def _read(scores: Scores) -> Tensor:
    """Whether the teacher reads each reply [B, 1], or all [1, 1]. The others count in no mean."""
    return torch.from_numpy(scores.teacher_reads)[:, None] if "teacher_reads" in scores else torch.ones(1, 1).bool()


def _kl_metrics(scores: Scores, mask: Tensor) -> dict[str, float]:
    """Metrics of `kl_summary` to the reference and to the teacher, of the policy before the update."""
    found: dict[str, float] = {}
    if "teacher_reads" in scores:
        found["rollout/teacher_unread"] = float((~scores.teacher_reads).sum())
    for name, column in scores.pick("ref_logprobs", "teacher_logprobs").items():
        of, counted = ("reference", mask) if name == "ref_logprobs" else ("teacher", mask & _read(scores))
        kl = kl_summary(_dense(scores.logprobs), _dense(column), counted)
        found |= {f"kl/{of}_{estimator}": value for estimator, value in kl.items()}
    return found


def _mismatch_metrics(mismatch: dict[str, float], limit: float) -> dict[str, float]:
    """Metrics of the second result of `_weights`. Raises as `check_mismatch`."""
    check_mismatch(mismatch["mean_abs_diff"], limit)
    own = {"rollout/mismatch_own_routes": mismatch["own_routes"]} if "own_routes" in mismatch else {}
    return own | {
        "rollout/mismatch": mismatch["mean_abs_diff"],
        "rollout/mismatch_max": mismatch["max_abs_diff"],
        "rollout/effective_sample_share": mismatch["effective_sample_share"],
        "rollout/capped_share": mismatch["capped_share"],
    }


def _final_rewards(
    config: PPOStageConfig, rewards: Tensor, ended: Tensor, mask: Tensor, scores: Scores
) -> tuple[Tensor, Tensor]:
    """(rewards [B] with the config's rules for replies that were cut off or are too long, value of the state after
    each [B])."""
    bootstrap = torch.zeros_like(rewards)
    if config.truncated == "bootstrap":
        # A cut is no terminal state: the unfinished reply earns no score, and the critic estimates its value.
        bootstrap = torch.where(ended, 0.0, torch.from_numpy(scores.final_values))
        rewards = rewards * ended
    elif config.truncated == "lowest":
        rewards = lowest_where_cut(rewards, ended)
    else:
        rewards = rewards - config.truncation_penalty * (~ended)
    if config.overlong_buffer is not None:
        rewards = rewards + overlong_penalty(mask.sum(-1), config.max_new_tokens, config.overlong_buffer)
    return rewards, bootstrap


def _advantage_inputs(
    config: PPOStageConfig,
    text: TextBatch,
    rollout: Rollout,
    scores: Scores,
    rewards: Tensor,
    bootstrap: Tensor,
    groups: Tensor,
    kl_coef: float,
) -> AdvantageInputs:
    """The rollout in padded rows [B, T], which only advantages need: they run over all replies at once, from the last
    token back."""
    mask, has_critic = _mask(rollout), config.critic_in_use != "none"
    penalties = zeros = torch.zeros(mask.shape)
    if config.kl.place == "reward" and kl_coef:
        logprobs, ref_logprobs = _dense(scores.logprobs), _dense(scores.ref_logprobs)
        penalties = kl_coef * kl_estimate(logprobs, ref_logprobs, config.kl.estimator)
    turn_rewards = _dense(rollout.turn_rewards) if rollout.are_episodes else zeros
    # Equal replies get one KL: differences in the last bits would be amplified by the group's deviation.
    alike = torch.from_numpy(first_alike(text.row_keys()))
    return AdvantageInputs(
        scores=rewards - (penalties * mask).sum(-1)[alike],
        # Rewards that belong to no turn, from other sources or for a cut, go on the last token.
        rewards=place_rewards(rewards - turn_rewards.sum(-1), penalties, mask) + turn_rewards,
        mask=mask,
        groups=groups,
        values=_dense(scores.values) if has_critic and "values" in scores else zeros,
        bootstrap_values=bootstrap,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda if has_critic else 1.0,
    )


def _mask(rollout: Rollout) -> Tensor:
    """True at tokens that the policy sampled [B, T]."""
    if rollout.are_episodes:
        return _dense(rollout.response_mask)
    return torch.from_numpy(rollout.rollout_logprobs.mask())


def _dense(column: Ragged | np.ndarray) -> Tensor:
    """A column with a value for each token, padded [B, T]."""
    assert isinstance(column, Ragged)
    return torch.from_numpy(column.dense())


def _ragged(column: Tensor, like: Ragged) -> Ragged:
    """A padded column [B, T] as rows of the lengths of `like`."""
    return Ragged(column[torch.from_numpy(like.mask())].float().numpy(), like.offsets)


def scaled_rewards(
    config: PPOStageConfig, rewards: RewardSources, sources: SourceScores, moments: RunningMoments
) -> Tensor:
    """The reward of each reply [B], scaled by `config.reward_scaling` and clipped; NaN if it has none. Updates the
    running `moments` of the weighted sum when the config scales by them."""
    raw = weighted_sum(sources, rewards.weights)
    if config.reward_scaling == "reward_model":
        scaled = rewards.scaled(sources)
    elif config.reward_scaling == "running":
        moments.update(raw[~raw.isnan()].tolist())
        scaled = (raw - moments.mean) / moments.std
    else:
        scaled = raw
    return scaled if config.reward_clip is None else scaled.clamp(-config.reward_clip, config.reward_clip)
