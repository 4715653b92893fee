"""The metrics of an iteration, as documented in docs/metrics.md, and the clock of its phases."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from xray_runtime.algorithms.rewards import SourceScores, statistics, weighted_sum
from xray_runtime.methods.common.results import metric_name
from xray_runtime.methods.common.sampling.episode import episode_means
from xray_runtime.methods.common.training.finite import naming
from xray_runtime.methods.common.training.steps import router_metrics
from xray_runtime.methods.ppo.objectives import OBSERVATIONS

POLICY_SUMS = {
    "policy/loss": "policy_loss",
    "policy/entropy": "entropy_sum",
    "policy/teacher_divergence": "teacher_divergence",
    "policy/clip_fraction": "clip_count",
    "policy/dual_clip_fraction": "dual_clip_count",
    "policy/approx_kl": "approx_kl_sum",
}
VALUE_SUMS = {"value/loss": "value_loss", "value/clip_fraction": "value_clip_count"}
"""Metric → the sum of a step that it is the mean of; of the critic, or else of the policy's value head."""
SUMMARIZED = {"kl/reference_k1": "KL", "kl/teacher_k1": "KL to the teacher"}
"""Metric → its name in the line about an iteration, where there is such a model."""

if TYPE_CHECKING:
    from xray_runtime.data.batch import Rollout
    from xray_runtime.methods.common.sampling.scoring import ScoredRollout
    from xray_runtime.methods.common.training.prompts import UniquePrompts
    from xray_runtime.methods.ppo.config import PPOConfig
    from xray_runtime.methods.ppo.experience import Experience
    from xray_runtime.methods.ppo.update import Update
    from xray_runtime.rewards.reward_sources import RewardSources


class PhaseClock:
    """Seconds per phase of an iteration; errors about numbers that are not finite name `where`, and the phase."""

    def __init__(self, where: str) -> None:
        self._where, self.seconds = where, dict[str, float]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with naming(f"{self._where} ({name})"):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        total = sum(self.seconds.values())
        return {f"seconds/{name}": s for name, s in self.seconds.items()} | {"seconds/total": total}


def iteration_metrics(
    config: PPOConfig,
    iteration: int,
    clock: PhaseClock,
    prompts: UniquePrompts,
    rewards: RewardSources,
    results: tuple[Rollout, ScoredRollout, Experience, Update],
    probe: float | None,
    golds: Sequence[float] | None,
) -> dict[str, float]:
    """All metrics of an iteration except those of validation, KL controller, hacking monitor and `Rollouts`.

    Args:
        results: the iteration's results, in that order.
        probe: mismatch of the generator; None if it was not probed.
        golds: gold score of each reply; None without `gold`.
    """
    rollout, scored, experience, update = results
    metrics = experience.metrics | reward_metrics(rewards, scored.sources) | update_metrics(update)
    metrics |= rollout_metrics(config, rollout, scored, iteration) | speed_metrics(config, experience, update, clock)
    if probe is not None:
        metrics["sync/mismatch"] = probe
    if golds is not None:
        metrics |= {"reward/gold": float(np.mean(golds)), "reward/gold_std": float(np.std(golds))}
    return metrics if iteration else metrics | prompts.metrics()


def reward_metrics(rewards: RewardSources, sources: SourceScores) -> dict[str, float]:
    """Mean of the raw reward, number of replies without one, and statistics of each source."""
    raw = weighted_sum(sources, rewards.weights)
    metrics = {"reward/raw": float(raw.nanmean()), "reward/failed": float(raw.isnan().sum())}
    for source, numbers in statistics(sources).items():
        metrics |= {f"reward/source/{metric_name(source)}/{key}": value for key, value in numbers.items()}
    return metrics


def rollout_metrics(config: PPOConfig, rollout: Rollout, scored: ScoredRollout, iteration: int) -> dict[str, float]:
    """Metrics of the replies as sampled (`rollout`) and with tied groups replaced (`scored`)."""
    version, episodes = float(rollout.version.mean()), scored.rollout
    metrics = {"rollout/version": version, "rollout/lag": iteration - version}
    metrics["rollout/distinct_replies"] = len(set(scored.replies)) / len(scored.replies)
    if any(scored.reasoning_lengths):
        metrics["rollout/reasoning_length"] = float(np.mean(scored.reasoning_lengths))
        whole = [len(ids) for ids in scored.rollout.own_tokens()]
        metrics["rollout/answer_length"] = float(np.mean(whole)) - metrics["rollout/reasoning_length"]
    if episodes.are_episodes:
        metrics |= {f"rollout/{name}": mean for name, mean in episode_means(episodes).items()}
        metrics |= {f"rollout/seat/{seat}": mean for seat, mean in seat_rewards(episodes).items()}
    if config.resample_rounds:
        metrics["rollout/resampled_groups"] = scored.num_dropped / config.samples_per_prompt
    return metrics


def seat_rewards(episodes: Rollout) -> dict[str, float]:
    """Seat → mean reward of its rows that have one."""
    if "seat" not in episodes:
        return {}
    rewarded = ~np.isnan(episodes.episode_reward)
    found = {seat: episodes.episode_reward[rewarded & (episodes.seat == seat)] for seat in sorted(set(episodes.seat))}
    return {seat: float(rewards.mean()) for seat, rewards in found.items() if len(rewards)}


def update_metrics(update: Update) -> dict[str, float]:
    """Means over the steps that were taken: losses and counts per token, norms per step."""
    steps = update.steps
    taken = [step for step in steps if step.taken]
    policies = [step.results["policy"] for step in taken]
    critics = [step.results["critic"] for step in taken if "critic" in step.results]
    num_tokens = max(sum(step.totals.tokens for step in taken), 1.0)
    metrics = {
        shown: sum(found.sums[name] for found in of) / num_tokens
        for names, of in ((POLICY_SUMS, policies), (VALUE_SUMS, critics or policies))
        for shown, name in names.items()
        if of and name in of[0].sums
    }
    metrics |= {"policy/grad_norm": sum(p.grad_norm for p in policies) / len(steps), "policy/lr": steps[-1].lr}
    metrics |= router_metrics([policy.sums for policy in policies])
    if counted := sum(step.totals.counts.get(OBSERVATIONS, 0.0) for step in taken):
        metrics["policy/observation_loss"] = sum(policy.sums[OBSERVATIONS] for policy in policies) / counted
    if critics:
        metrics["value/grad_norm"] = sum(critic.grad_norm for critic in critics) / len(steps)
    return metrics | {"policy/updates": float(len(steps)), "policy/stopped_early": float(update.stopped_early)}


def speed_metrics(config: PPOConfig, experience: Experience, update: Update, clock: PhaseClock) -> dict[str, float]:
    """Seconds per phase, response tokens per second, and tokens that the policy's updates computed."""
    metrics, num_tokens = clock.metrics(), experience.num_tokens
    if not config.lag:
        metrics["speed/generate_tokens_per_s"] = num_tokens / clock.seconds["generate"]
    metrics["speed/score_tokens_per_s"] = num_tokens / clock.seconds["score"]
    metrics["speed/update_tokens_per_s"] = num_tokens * update.epochs / clock.seconds["update"]
    for role, name in (("policy", "speed/computed_tokens"), ("critic", "speed/critic_computed_tokens")):
        if results := [step.results[role] for step in update.steps if role in step.results]:
            metrics[name] = sum(result.computed_tokens for result in results)
    metrics["speed/response_tokens_per_s"] = num_tokens / metrics["seconds/total"]
    return metrics


def summary(metrics: dict[str, float]) -> str:
    """One line about an iteration."""
    kl = [f"{name} {metrics[key]:.2f} " for key, name in SUMMARIZED.items() if key in metrics]
    gold = f"gold {metrics['reward/gold']:+.3f} " if "reward/gold" in metrics else ""
    unread = f"{count:.0f} replies unread by the teacher " if (count := metrics.get("rollout/teacher_unread")) else ""
    phases = " ".join(f"{name} {metrics[f'seconds/{name}']:.1f}s" for name in ("sync", "generate", "score", "update"))
    return f"reward {metrics['reward/mean']:+.3f} {gold}{''.join(kl)}{unread}| {phases}"
