"""Fields of a `ppo` stage that exclude each other: because of its loss, its advantages or its environment.

Each takes a `PPOStageConfig`, whose module imports this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xray_runtime.engines.layouts import GENERATORS
from xray_runtime.engines.sampling_config import LARGEST_SET
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.plugs import able, unsupported
from xray_runtime.methods.common.environment import AgentConfig, check_turns

WHOLE_REPLIES = ("gspo", "gmpo")
"""Losses in which the ratio, and so the weight, of a reply's tokens is one."""


def check_correction(config: Any, anchored: bool) -> None:
    """Raises ValueError if the importance weights do not fit the loss.

    Args:
        anchored: whether its ratio is that to the sampler's own probabilities.
    """
    mode, lag, floor = config.importance_correction, config.lag, config.importance_floor
    if anchored and mode != "none":
        raise ValueError(
            f"importance_correction = {mode!r} must be 'none' with loss = {config.loss!r}, which reads "
            "rollout_logprobs instead of old_logprobs and so corrects for the sampler itself"
        )
    if config.score_centering and anchored:
        raise ValueError(
            f"score_centering = True must be False with loss = {config.loss!r}, which weights each token by the "
            "policy's ratio to the sampler: that leaves nothing to center"
        )
    whole: dict[str, tuple[str, ...]] = {"importance_level": ("reply",), "loss": WHOLE_REPLIES}
    for field, values in whole.items():
        if config.score_centering and getattr(config, field) in values:
            raise ValueError(
                f"score_centering = True must be False with {field} = {getattr(config, field)!r}: the weight of a "
                "token would be that of a whole reply"
            )
    if lag and not anchored and mode == "none":
        raise ValueError(
            f"importance_correction = 'none' must be 'truncate' or 'mask' with lag = {lag}: replies come from the "
            "policy before an update"
        )
    if floor and mode != "mask":
        raise ValueError(
            f"importance_floor = {floor} must be 0 with importance_correction = {mode!r}: only 'mask' drops tokens"
        )


def check_cuts(config: Any) -> None:
    """Raises ValueError if a `PPOConfig` cannot sample from a part of the vocabulary."""
    if config.cuts and config.distillation is not None:
        why = "a teacher's log-probabilities are those in the whole vocabulary"
        raise ValueError(unsupported(config.cuts, "distillation", why=why))
    check_reported(config, config.cuts, LARGEST_SET)


def check_reported(config: Any, feature: str, count: int) -> None:
    """Raises ValueError if the generator of a `PPOConfig` does not report `count` of the likeliest tokens at each
    place, which `feature` needs; empty: there is none."""
    if not feature:
        return
    if config.environment is not None:
        why = "the tokens of a turn are kept without the others that could have been"
        raise ValueError(unsupported(feature, "environment", why=why))
    if config.in_flight_updates:
        why = "they are reported for whole replies of one policy"
        raise ValueError(unsupported(feature, "in_flight_updates = True", why=why))
    if config.generator.capabilities.top_logprobs < count:
        where = f"generator.engine = {config.generator.engine!r}"
        raise ValueError(unsupported(feature, where, able(GENERATORS, "top_logprobs")))


def check_sources(config: Any) -> None:
    """Raises ValueError if `advantages: gdpo` would not see a part of the reward, since it reads the sources alone."""
    if config.advantages != "gdpo":
        return
    needed: dict[str, tuple[object, object]] = {
        "truncated": (config.truncated, "lowest"),
        "overlong_buffer": (config.overlong_buffer, None),
        "kl.place": (config.kl.place if config.kl.coef else "loss", "loss"),
    }
    for field, (value, allowed) in needed.items():
        if value != allowed:
            raise ValueError(
                f"{field} = {value!r} must be {allowed!r} with advantages = 'gdpo', which compares each source of "
                "reward by itself"
            )


def check_teachers(config: Any, inputs: Mapping[str, Any]) -> None:
    """Raises ValueError if the inputs are not the teachers that `distillation` names, or cannot teach."""
    given = sum(name.startswith("teacher.") for name in inputs)
    if config.distillation is None:
        if given:
            raise ValueError("distillation: is required with a teacher: it says how it counts")
        return
    wanted = config.distillation.num_models
    if given != wanted:
        raise ValueError(
            f"teacher: {given} models are not allowed: distillation has {wanted} (source = "
            f"{config.distillation.source!r}, values = {config.distillation.values!r})"
        )
    if config.distillation.source == "server" and config.temperature != 1.0:
        raise ValueError(
            f"temperature = {config.temperature:g} must be 1 with distillation.source = 'server': servers tell "
            "log-probabilities at temperature 1"
        )
    if isinstance(config.environment, AgentConfig):
        raise ValueError("distillation: is not allowed with an agent, whose episode has branches")
    if config.environment is not None and config.distillation.demonstration is not None:
        raise ValueError("distillation.demonstration: is not allowed with an environment, which makes its own prompts")


def check_champion(config: Any, inputs: Mapping[str, Any]) -> None:
    """Raises ValueError if there is a champion that plays no seat, or none for its seats."""
    seats = getattr(config.environment, "champion_seats", [])
    if ("champion" in inputs) != bool(seats):
        raise ValueError(
            f"environment.champion_seats = {seats} must name the seats of the champion, if and only if one is passed"
        )


def check_awake(environment: Any, runtime: RuntimeConfig) -> None:
    """Raises ValueError if a champion would have to sleep."""
    if getattr(environment, "champion_seats", ()) and runtime.generator_sleeps:
        raise ValueError(
            "environment.champion_seats must be [] with runtime.generator_sleeps = True: the champion never sleeps"
        )


def check_environment(config: Any) -> None:
    """Raises ValueError if other fields do not fit `environment`."""
    environment = config.environment
    if config.in_flight_updates and not config.lag:
        raise ValueError(
            "in_flight_updates = True must be False with lag = 0: replies that run across an update have tokens of an "
            "older policy"
        )
    if config.in_flight_updates and config.routing == "replay":
        raise ValueError(
            "routing = 'replay' must be 'own' with in_flight_updates = True: routes are recorded for whole replies"
        )
    if config.oversample and not config.in_flight_updates:
        raise ValueError(
            f"oversample = {config.oversample} must be 0 without in_flight_updates: only they leave replies unfinished"
        )
    if environment is None:
        if config.observation_coef:
            raise ValueError(
                f"observation_coef = {config.observation_coef} must be 0 without an environment: the policy reads "
                "nothing between turns"
            )
        return
    check_turns(environment, config.max_new_tokens, config.stop, seats=True)
    if config.in_flight_updates and getattr(environment, "seats", ()):
        raise ValueError(
            "in_flight_updates = True must be False with environment.seats, whose turns wait for each other"
        )
    if config.observation_coef and getattr(environment, "untrainable", "refuse") == "leave_out":
        raise ValueError(
            f"observation_coef = {config.observation_coef} must be 0 with environment.untrainable = 'leave_out': the "
            "policy would learn the replies that are left out, as if it had read them"
        )
    if environment.rows_an_episode > 1:
        for field in ("validation", "curriculum", "resample_rounds"):
            if getattr(config, field):
                raise ValueError(f"{field} must be left out with environment.seats: it counts a row for each episode")
    needed: dict[str, tuple[object, str]] = {
        "overlong_buffer": (None, "it limits the length of a single reply"),
        "reward_scaling": ("none", "rewards of single turns are not scaled"),
        "reward_clip": (None, "rewards of single turns are not clipped"),
    }
    for field, (allowed, why) in needed.items():
        if getattr(config, field) != allowed:
            raise ValueError(f"{field} = {getattr(config, field)!r} must be {allowed!r} with an environment: {why}")
