"""Published methods as settings."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.published import METHODS, Method

GAME = {"path": "m:E", "max_turns": 2, "max_tokens": 64}
OF_EPISODES = ("echo",)
"""Methods that need an environment."""


def test_every_method_is_there_and_valid() -> None:
    assert set(get_args(Method)) == set(METHODS)
    for name, settings in METHODS.items():
        given = {"environment": GAME} if name in OF_EPISODES else {}
        config = PPOStageConfig(method=name, **given)  # type: ignore[arg-type]
        for field, value in settings.items():
            found: Any = getattr(config, field)
            assert found == value if field != "kl" else {k: getattr(found, k) for k in value} == value
        assert (config.critic_in_use == "none") == (name != "ppo")


def test_dapos_buffer_is_a_fifth_of_the_longest_reply() -> None:
    """As in the paper, 4,096 of 20,480 tokens, however long replies may be here."""
    for tokens, buffer in ((20_480, 4096), (1024, 204), (16, 3), (4, 1)):
        assert PPOStageConfig(method="dapo", max_new_tokens=tokens).overlong_buffer == buffer
    assert PPOStageConfig(method="dapo").overlong_buffer == 3
    assert PPOStageConfig(method="dapo", overlong_buffer=7, max_new_tokens=20).overlong_buffer == 7
    assert PPOStageConfig(method="dapo", overlong_buffer=None).overlong_buffer is None
    # Turns of a conversation have none.
    played = PPOStageConfig(method="dapo", environment={"path": "m:E", "max_turns": 2, "max_tokens": 64})  # type: ignore[arg-type]
    assert played.overlong_buffer is None


def test_whole_episodes_are_credited() -> None:
    episodes: dict[str, Any] = {"environment": {"path": "m:E", "max_turns": 2, "max_tokens": 64}}
    assert PPOStageConfig(**episodes).gae_lambda == 1.0
    assert PPOStageConfig(**episodes, gae_lambda=0.9).gae_lambda == 0.9
    assert PPOStageConfig().gae_lambda == 0.95


def test_written_fields_override_the_methods_defaults() -> None:
    config = PPOStageConfig(method="grpo", samples_per_prompt=4, kl={"coef": 0.5})  # type: ignore[arg-type]
    assert (config.samples_per_prompt, config.advantages) == (4, "grpo")
    assert (config.kl.coef, config.kl.place, config.kl.controller) == (0.5, "loss", "fixed")
    # As it is recorded, it is read again.
    assert PPOStageConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advantages": "grpo", "truncated": "penalize"}, "samples_per_prompt = 1 must be at least 2"),
        ({"method": "grpo", "truncated": "bootstrap"}, "truncated = 'bootstrap' must be 'lowest' or 'penalize'"),
        ({"method": "dapo", "lag": 1}, "resample_rounds = 2 must be 0 with lag = 1"),
        ({"resample_rounds": 1}, "resample_rounds = 1 must be 0 with samples_per_prompt = 1"),
        ({"method": "dapo", "overlong_buffer": 99}, "overlong_buffer = 99 must be at most max_new_tokens = 16"),
        ({"method": "rloo", "prompts_per_iteration": 6, "minibatch_size": 7}, "must divide .* = 24"),
        ({"method": "gepo"}, "method"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PPOStageConfig(**fields)
