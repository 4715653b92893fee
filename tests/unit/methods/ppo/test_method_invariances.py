"""What must not change the gradient of any published method, from rewards to the loss of a real tiny model.

Two prompts, four replies each, of lengths and rewards that differ. `build_experience` and the objective work together
as in the loop, so estimators, aggregation, penalties and corrections are all in it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.methods.ppo.method_setting import (
    KL_COEF,
    NAN,
    REWARDS,
    MakeLM,
    Setting,
    of_one_source,
)
from tests.unit.methods.ppo.parts import typed
from xray_runtime.methods.ppo.experience import build_experience
from xray_runtime.methods.ppo.published import METHODS
from xray_runtime.methods.ppo.update import step_totals

GROUPED = [name for name, settings in METHODS.items() if settings.get("advantages") in ("grpo", "dr_grpo", "rloo")]
"""Not `max_rl`, which divides by a group's mean, nor `gdpo`, which forbids the settings of these tests."""


def close(found: Tensor, expected: Tensor) -> None:
    """Advantages are float32."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("method", METHODS)
def test_neither_order_nor_split_shows(make_lm: MakeLM, method: str) -> None:
    setting = Setting(make_lm, method)
    whole = setting.of(REWARDS)
    assert whole.abs().max() > 1e-4
    # Groups change places, and replies within them.
    close(setting.of(REWARDS, [6, 4, 7, 5, 1, 0, 3, 2]), whole)
    close(setting.of(REWARDS, parts=[[3], [0, 6], [5, 1, 2], [7, 4]]), whole)


@pytest.mark.parametrize("method", GROUPED)
def test_a_prompt_that_pays_more_teaches_nothing_else(make_lm: MakeLM, method: str) -> None:
    """What is added to all rewards of a group is gone with its mean."""
    setting = Setting(make_lm, method, truncated="penalize", overlong_buffer=None)
    close(setting.of([*REWARDS[:4], *(r + 2.0 for r in REWARDS[4:])]), setting.of(REWARDS))


@pytest.mark.parametrize("method", METHODS)
def test_a_reply_whose_score_failed_is_absent(make_lm: MakeLM, method: str) -> None:
    setting = Setting(make_lm, method)
    lost = [NAN, *REWARDS[1:]]
    rows, _ = setting.experience(lost)
    assert rows.id.tolist() == [1, 2, 3, 4, 5, 6, 7]
    found = setting.of(lost)
    assert found.isfinite().all()
    assert (found - setting.of(REWARDS)).abs().max() > 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_replies_that_were_all_cut_leave_a_finite_gradient(make_lm: MakeLM, method: str) -> None:
    setting = Setting(make_lm, method)
    rows, rollout, scores = setting.rollout()
    rollout["ended"] = np.zeros(8, bool)
    rewards = torch.tensor(REWARDS)
    facts = of_one_source(rewards)
    made = build_experience(setting.config, *typed(rows, rollout, scores), rewards, KL_COEF, facts=facts)
    totals = step_totals(setting.config, made.rows, KL_COEF)
    assert setting.gradient(made.rows, totals).isfinite().all()


@pytest.mark.parametrize("reward", [0.0, 100.3])
@pytest.mark.parametrize("method", [*(m for m in GROUPED if m != "prime_rl"), "reinforce++"])
def test_rewards_that_are_all_the_same_teach_nothing(make_lm: MakeLM, method: str, reward: float) -> None:
    """Without the KL and the bonus for entropy, which pull in any case, the gradient is exactly zero; prime-rl's loss
    has such a term of its own."""
    without_kl = {"controller": "fixed", "coef": 0.0, "place": "loss", "estimator": "k3"}
    plain = {"truncated": "penalize", "truncation_penalty": 0.0, "overlong_buffer": None}
    setting = Setting(make_lm, method, kl=without_kl, entropy_coef=0.0, observation_coef=0.0, **plain)
    rows, _ = setting.experience([reward] * 8)
    assert not rows.advantages.values.any()
    assert not setting.gradient(rows, step_totals(setting.config, rows, 0.0)).any()


@pytest.mark.parametrize("method", GROUPED)
def test_a_group_of_one_teaches_nothing(make_lm: MakeLM, method: str) -> None:
    """Of whose others the scores failed: peers learn from its raw reward."""
    setting = Setting(make_lm, method, whiten_advantages=False)
    rows, _ = setting.experience([NAN, NAN, NAN, 5.0, *REWARDS[4:]])
    assert rows.id.tolist() == [3, 4, 5, 6, 7]
    assert not next(iter(rows.advantages)).any()
    assert rows.advantages.values.any()
