"""What a loss or an advantage reads is computed and sent, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.message_texts import Messages
from tests.unit.methods.ppo.loop import REPLIES, World, attempt
from tests.unit.methods.ppo.method_setting import KL_COEF, REWARDS, MakeLM, Setting, as_tensors
from tests.unit.methods.ppo.parts import typed
from xray_runtime.algorithms.checking import advantage_reads, check_advantages, check_loss, loss_reads
from xray_runtime.algorithms.estimators import AdvantageInputs
from xray_runtime.algorithms.losses import PolicyLossInputs
from xray_runtime.data.batch import PolicyBatch, StepTotals
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.experience import build_experience
from xray_runtime.methods.ppo.functions import Functions, RowFacts
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models.objectives import training_loss

DPPO: dict[str, Any] = {"method": "dppo_tv", "samples_per_prompt": 2, "prompts_per_iteration": 2, "minibatch_size": 4}
NO_KL = {"controller": "fixed", "coef": 0.0}


def everything(tokens: PolicyLossInputs) -> Tensor:
    """Each stream with a factor of its own."""
    facts = tokens.versions + 10 * tokens.groups + 100 * tokens.turns + 1000 * tokens.column("level")
    return tokens.logprobs * facts + tokens.old_logprobs + tokens.rollout_logprobs + tokens.ref_logprobs


def test_what_a_function_reads_is_found_by_trying_it() -> None:
    assert loss_reads(lambda t: -t.advantages * t.logprobs) == set()
    assert loss_reads(lambda t: -t.log_ratio.exp() * t.advantages) == {"old_logprobs"}
    assert loss_reads(everything) == {
        *("versions", "groups", "turns", "column level", "old_logprobs", "rollout_logprobs", "ref_logprobs"),
    }
    assert advantage_reads(lambda r: r.scores) == set()
    assert advantage_reads(lambda r: r.scores * r.column("level")) == {"column level"}
    assert advantage_reads(lambda r: r.topk_logprobs.sum(-1)) == {"topk_logprobs"}


def test_checks_try_streams_too() -> None:
    check_loss(lambda t: t.logprobs * (t.versions + t.column("level")) + t.ref_logprobs)
    with pytest.raises(ValueError, match="couples tokens of two replies"):
        check_loss(lambda t: t.logprobs * t.column("level").mean())
    with pytest.raises(ValueError, match="tokens that the policy did not choose"):
        check_loss(lambda t: t.logprobs + _of_reply(t, t.rollout_logprobs))
    check_advantages(lambda r: r.scores * r.column("level") + ((r.rollout_logprobs + r.versions) * r.mask).sum(-1))
    check_advantages(lambda r: (r.topk_logprobs.exp().sum(-1) + r.topk_ids[..., 0]) * r.mask)
    with pytest.raises(ValueError, match="depends on padding"):
        check_advantages(lambda r: r.scores + r.rollout_logprobs.mean())
    with pytest.raises(ValueError, match="depends on padding"):
        check_advantages(lambda r: r.scores + r.topk_logprobs.mean())
    with pytest.raises(ValueError, match="depends on the order of the replies"):
        check_advantages(lambda r: r.scores + (r.versions * r.mask).sum(-1).cumsum(0))


def _of_reply(tokens: PolicyLossInputs, x: Tensor) -> Tensor:
    assert tokens.replies is not None
    return x.new_zeros(int(tokens.replies.max()) + 1).index_add(0, tokens.replies, x)[tokens.replies]


def test_a_stream_that_was_not_read_when_tried_is_not_there(message_texts: Messages) -> None:
    given = torch.zeros(1)
    tokens = PolicyLossInputs(given, given, given, None, 0.2, 0.2, None, {"old_logprobs": given})
    with message_texts.raises(ValueError):
        tokens.ref_logprobs  # noqa: B018


def test_the_policy_does_not_score_what_nothing_reads(inputs: PPOInputs, tmp_path: Path) -> None:
    """Only a few rows, to compare generator and trainer: here all four, one in each iteration's place."""
    world = World()
    recorder = attempt(inputs, tmp_path / "out", world, **DPPO, kl=NO_KL, iterations=1)
    # After the other models, and after nothing else.
    assert world.calls[1:4] == ["reference score", "rewards.0 score", "policy score"]
    [(_, rows, *_)] = world.batches
    assert "old_logprobs" not in rows
    assert "rollout_logprobs" in rows
    [point] = recorder.points
    assert point["sync/mismatch"] == 0.0
    assert "rollout/mismatch" not in point
    table = read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table
    assert "logprobs" not in table.column_names
    assert "rollout_logprobs" in table.column_names
    # With a lag the generator is probed instead.
    lagging = World()
    attempt(inputs, tmp_path / "lagging", lagging, **DPPO, kl=NO_KL, lag=1)
    assert lagging.scored["policy"] == 2 * 8
    assert lagging.scored["reference"] == 2 * REPLIES


def test_generator_and_trainer_are_compared_without_the_scores(inputs: PPOInputs, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^generator and trainer differ by 0\.3 nats per token"):
        attempt(inputs, tmp_path / "out", World(generator_off_by=0.3), **DPPO, kl=NO_KL, max_mismatch=0.1)


@pytest.mark.parametrize("fields", [{"loss": "ppo"}, {"loss": "dppo_tv", "trainable_layers": 1}])
def test_the_policy_scores_what_something_reads(fields: dict[str, Any]) -> None:
    """The ratio of PPO; a reference that is a branch of the policy."""
    assert Functions.of(PPOStageConfig(**DPPO | fields)).scores_policy


@pytest.mark.parametrize(
    "fields",
    [
        {"importance_correction": "truncate"},
        {"method": "grpo", "lag": 1, "importance_correction": "none"},
        {"method": "grpo", "importance_floor": 0.5},
        {"method": "gdpo", "truncated": "penalize"},
        {"method": "gdpo", "overlong_buffer": 2},
        {"method": "gdpo", "kl": {"coef": 0.1}},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_settings_that_do_not_fit_are_refused(fields: dict[str, Any], message_texts: Messages) -> None:
    with message_texts.raises(ConfigError):
        validate_as(PPOStageConfig, DPPO | fields, "ppo")


@pytest.mark.parametrize(
    ("loss", "fields"),
    [
        (lambda t: -t.rollout_log_ratio.exp() * t.advantages, {}),
        (lambda t: -t.log_ratio.exp() * t.advantages, {"importance_correction": "none", "lag": 1}),
    ],
    ids=["corrects twice", "corrects nothing"],
)
def test_a_users_loss_and_the_correction(
    loss: Callable[[PolicyLossInputs], Tensor], fields: dict[str, Any], message_texts: Messages
) -> None:
    config = PPOStageConfig(**DPPO | {"method": "grpo", "loss": "mine:loss"} | fields)
    with message_texts.raises(ValueError):
        Functions.of(config, loss=loss)


def sent(make_lm: MakeLM, facts: RowFacts, **own: Any) -> tuple[Setting, PolicyBatch, Functions]:
    setting = Setting(make_lm, "dapo", overlong_buffer=None)
    functions = Functions.of(setting.config, **own)
    parts = typed(*setting.rollout())
    parts[1].version[:] = np.arange(8) % 3
    made = build_experience(setting.config, *parts, torch.tensor(REWARDS), KL_COEF, functions, facts=facts)
    return setting, made.rows, functions


def test_a_loss_gets_what_it_reads(make_lm: MakeLM) -> None:
    level = [3.0, 1, 4, 1, 5, 9, 2, True]
    setting, rows, functions = sent(make_lm, RowFacts(columns={"level": level}), loss=everything)
    objective = PPOObjective(setting.config, functions.loss)
    totals = StepTotals(tokens=1.0, rows=8.0)
    _, sums = training_loss(setting.module, objective, as_tensors(rows), totals)
    forward = objective.forward(setting.module, as_tensors(rows))
    counts = torch.from_numpy(rows.old_logprobs.lengths)
    version, group = torch.arange(8) % 3, torch.arange(8) // 4
    factor = (version + 10 * group + 1000 * torch.tensor(level)).double().repeat_interleave(counts)
    columns = rows.old_logprobs.values, rows.rollout_logprobs.values, rows.ref_logprobs.values
    terms = forward.logprobs * factor + torch.from_numpy(np.sum(columns, axis=0))
    expected = (terms * torch.from_numpy(rows.weights.values)).sum()
    assert float(sums["policy_loss"]) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_other_losses_are_sent_what_they_always_were(make_lm: MakeLM) -> None:
    _, rows, _ = sent(make_lm, RowFacts(columns={"level": [1.0] * 8}))
    assert set(rows.columns()) == {"input_ids", "prompt_lengths", "id", "old_logprobs", "advantages", "weights"}


def test_advantages_get_what_they_read(make_lm: MakeLM) -> None:
    def by_level(rollout: AdvantageInputs) -> Tensor:
        return rollout.column("level") + rollout.sources @ rollout.source_weights + rollout.versions[:, 0]

    facts = RowFacts({"level": range(8)}, {"a": torch.ones(8), "b": torch.arange(8.0), "c": torch.ones(8)})
    facts = RowFacts(facts.columns, facts.sources, {"a": 0.5, "b": 2.0, "c": 0.0})
    _, rows, _ = sent(make_lm, facts, advantages=by_level)
    # The sixth was cut off: of source b it gets no more than the lowest of those that ended, 0.
    scores = 0.5 + 2.0 * np.array([0, 1, 2, 3, 4, 0, 6, 7])
    assert [row[0] for row in rows.advantages] == pytest.approx(list(np.arange(8) + scores + np.arange(8) % 3))


def test_a_loss_needs_a_number_in_every_row(make_lm: MakeLM, message_texts: Messages) -> None:
    level = RowFacts(columns={"level": [1.0, None, *[2.0] * 5, None]})
    with message_texts.raises(ValueError):
        sent(make_lm, level, loss=lambda t: t.logprobs * t.column("level"))
    estimator = lambda r: r.scores * r.column("level").nan_to_num()  # noqa: E731
    _, rows, _ = sent(make_lm, level, advantages=estimator)
    assert rows.advantages.values.any()


@pytest.mark.parametrize("columns", [{}, {"level": ["hard"] * 8}], ids=["absent", "text"])
def test_columns_without_numbers_are_refused(make_lm: MakeLM, columns: dict[str, Any], message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        sent(make_lm, RowFacts(columns=columns), advantages=lambda r: r.scores * r.column("level"))
