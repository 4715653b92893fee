"""Losses, advantages and gradients against TRL's own code, by the numbers it gave for seeded inputs in float64.

`tests/oracles/trl.json` holds them; `python -m tests.oracles.make_trl` makes it anew. Where the two differ on purpose:

- GRPO divides by σ + 1e-4, X-ray by σ.
- An advantage is whitened by the sample deviation there, by the population's here.
- PPO's score stands there on the token after the reply's last one, with a value of its own, here on the last.
- GRPO's k3 in the loss has the gradient of the reverse KL, unless `use_bias_correction_kl`: X-ray always weighs by ρ.
- CISPO's `epsilon_high` is the bound itself there, 1 + ε_high here.
- RLOO's loss there clips one ratio a reply, of its summed log-probabilities; here each token has one, as in PPO. Sums
  over a reply have equal gradients until the policy has moved. `method: rloo` takes each reply's mean instead.
- KTO's z is one micro-batch's there, a whole step's here.
- DPO's labels are smoothed there in CPO alone.

Rewards there are float32, all else here is float64: tolerances are 1e-6 and 1e-12.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.unit.models.tensors import batch
from xray_runtime.algorithms.advantages import gae, place_rewards, whiten
from xray_runtime.algorithms.distillation import generalized_jsd
from xray_runtime.algorithms.groups import GroupBaseline, group_advantages
from xray_runtime.algorithms.kl import kl_estimate
from xray_runtime.algorithms.losses import policy_loss, value_losses
from xray_runtime.algorithms.preference_losses import kto_baseline
from xray_runtime.data.batch import StepTotals
from xray_runtime.methods.common.preference_objectives import DPOObjective, KTOObjective
from xray_runtime.methods.dpo.config import DPOConfig
from xray_runtime.methods.kto.config import KTOConfig
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import training_loss

TRL: dict[str, Any] = json.loads((Path(__file__).parents[2] / "oracles" / "trl.json").read_text())
SETTINGS = TRL["settings"]
EXACT = {"rtol": 1e-12, "atol": 1e-12}
PROMPT = 2
"""Tokens before each reply in the inputs of DPO and KTO."""


def tensors(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: as_tensor(value) for name, value in values.items()}


def as_tensor(value: Any) -> Tensor:
    found = torch.tensor(value)
    return torch.tensor(value, dtype=torch.float64) if found.is_floating_point() else found


class Model:
    """A module that answers with given logits [N', V]."""

    scalar = auxiliary = passes = None

    def __init__(self, states: Tensor) -> None:
        self._states = states

    def noting_passes(self) -> Model:
        return self

    def hidden(self, ids: Tensor, lengths: Tensor, trunk: Tensor | None = None, prompts: None = None) -> Tensor:
        assert len(ids) == int(lengths.sum()) == len(self._states)
        return self._states

    def logprobs(self, states: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        found = torch.log_softmax(states / temperature, -1).gather(-1, targets[:, None])[:, 0]
        return found, torch.zeros_like(found)


class Known(Model):
    """A module whose states [N', 1] are the next tokens' log-probabilities."""

    def logprobs(self, states: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return states[:, 0], torch.zeros_like(states[:, 0])


def loss_of(objective: Any, model: Model, rows: dict[str, Tensor], totals: StepTotals) -> tuple[Tensor, Any]:
    loss, stats = training_loss(cast(HeadedLM, model), objective, batch(rows), totals)
    return loss, stats


def test_the_fixture_names_where_it_comes_from() -> None:
    assert TRL["trl"] == "1.11.0"
    assert TRL["made_by"] == "python -m tests.oracles.make_trl"


# Groups


@pytest.mark.parametrize("baseline", ["grpo", "dr_grpo", "rloo"])
def test_advantages_of_groups(baseline: GroupBaseline) -> None:
    rewards = [score for group in TRL["rewards"] for score in group]
    scores = torch.tensor([float("nan") if score is None else score for score in rewards], dtype=torch.float64)
    ours = group_advantages(scores, torch.arange(12) // 4, baseline)
    theirs = as_tensor(TRL["rloo"]["advantages"] if baseline == "rloo" else TRL["advantages"][baseline])
    if baseline == "grpo":
        sigma = torch.stack([group[~group.isnan()].std() for group in scores.split(4)]).repeat_interleave(4)
        ours = ours * sigma / (sigma + 1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


# Policy gradients

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_mean": "replies"},
    "bnpo": {"loss_mean": "tokens"},
    "dapo": {"loss_mean": "tokens"},
    "dr_grpo": {"loss_mean": "fixed"},
    "two_sided": {"loss_mean": "tokens", "dual_clip": SETTINGS["delta"]},
    "gspo": {"loss": "gspo", "loss_mean": "replies"},
    "cispo": {"loss": "cispo", "loss_mean": "tokens"},
    "sapo": {"loss": "sapo", "loss_mean": "replies"},
    "luspo": {"loss": "gspo", "loss_mean": "fixed"},
    "vespo": {"loss": "vespo", "loss_mean": "tokens", "importance_correction": "none"},
    "gmpo": {"loss": "gmpo", "loss_mean": "replies"},
    "weighted_k3": {
        "loss_mean": "replies",
        "kl": {"controller": "fixed", "coef": SETTINGS["beta"], "place": "loss", "estimator": "k3"},
    },
}


def policy_rows() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(rows with a prompt of one token each, the inputs' mask [B, T], leaf of log-probabilities [B, T])."""
    given = tensors(TRL["policy"]["inputs"])
    mask = given["mask"].bool()
    lengths = mask.sum(1) + 1
    flat = {name: given[name][mask] for name in ("old_logprobs", "ref_logprobs")}
    flat |= {"rollout_logprobs": flat["old_logprobs"]}  # TRL without vLLM knows but one
    advantages = given["advantages"][:, None].expand_as(mask)[mask]
    rows = flat | {"advantages": advantages, "weights": torch.ones_like(advantages)}
    rows |= {"input_ids": torch.zeros(int(lengths.sum()), dtype=torch.int64), "lengths": lengths}
    rows |= {"prompt_lengths": torch.ones_like(lengths)}
    return rows, mask, given["logprobs"].requires_grad_()


def states_of(logprobs: Tensor, mask: Tensor) -> Tensor:
    """[N', 1] for `Known`: the state before each token of a reply, and one after its last."""
    after = torch.cat([logprobs, torch.zeros_like(logprobs[:, :1])], 1)
    kept = torch.cat([mask, torch.zeros_like(mask[:, :1])], 1) | (torch.arange(after.shape[1]) == mask.sum(1)[:, None])
    return after[kept][:, None]


@pytest.mark.parametrize("case", CASES)
def test_policy_losses_and_their_gradients(case: str) -> None:
    rows, mask, leaf = policy_rows()
    fields = {"clip_range": SETTINGS["epsilon"], "clip_range_high": SETTINGS["epsilon_high"], "dual_clip": None}
    fields |= {"max_new_tokens": SETTINGS["max_tokens"], "kl": {"controller": "fixed", "coef": 0.0}} | CASES[case]
    totals = StepTotals(tokens=float(mask.sum()), rows=float(len(mask)), kl_coef=SETTINGS["beta"])
    objective = PPOObjective(PPOStageConfig.model_validate(fields))
    loss, stats = loss_of(objective, Known(states_of(leaf, mask)), rows, totals)
    expected = tensors(TRL["policy"]["cases"][case])
    if case == "luspo":  # here the sum is also divided by the tokens that a reply may have
        loss = loss * SETTINGS["max_tokens"]
    near = {"rtol": 1e-6, "atol": 1e-6} if case == "sapo" else EXACT  # its temperatures are float32 there
    torch.testing.assert_close(loss, expected["loss"], **near)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], expected["gradient"], **near)
    # What is clipped is among the inputs.
    assert (stats["clip_count"] > 1) == (case not in ("sapo", "vespo"))
    assert (stats["dual_clip_count"] > 0) == (case == "two_sided")


@pytest.mark.parametrize("beta", ["0.0", "0.3", "1.0"])
def test_divergences_from_a_teacher(beta: str) -> None:
    """TRL's β weights the teacher too; both call the forward KL 0 and the reverse 1."""
    given = TRL["divergences"]
    leaf = as_tensor(given["student"]).requires_grad_()
    student, teacher = (
        (logits[0] / given["temperature"]).log_softmax(-1) for logits in (leaf, as_tensor(given["teacher"]))
    )
    found = generalized_jsd(student, teacher, float(beta), whole=True).sum()
    expected = tensors(given["by_beta"][beta])
    torch.testing.assert_close(found, expected["loss"], **EXACT)
    torch.testing.assert_close(torch.autograd.grad(found, leaf)[0], expected["gradient"], **EXACT)


def test_k3_is_the_same_estimate_and_another_gradient() -> None:
    rows, mask, leaf = policy_rows()
    cases = {name: tensors(TRL["policy"]["cases"][name]) for name in ("grpo", "k3", "weighted_k3")}
    estimate = kl_estimate(leaf[mask], rows["ref_logprobs"], "k3")
    lengths = mask.sum(1)
    mean = (estimate / lengths.repeat_interleave(lengths)).sum() / len(mask)
    loss = SETTINGS["beta"] * mean
    torch.testing.assert_close(loss, cases["k3"]["loss"] - cases["grpo"]["loss"], **EXACT)
    gradient = cases["k3"]["gradient"] - cases["grpo"]["gradient"]
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], gradient, **EXACT)
    assert (cases["k3"]["gradient"] - cases["weighted_k3"]["gradient"]).abs().max() > 1e-3


def test_rloo_before_the_policy_has_moved() -> None:
    rows, mask, leaf = policy_rows()
    logprobs = leaf[mask]
    loss, _ = policy_loss(
        logprobs, logprobs.detach(), rows["advantages"], torch.ones_like(logprobs), clip_range=0.2, dual_clip=None
    )
    expected = tensors(TRL["rloo"]["unmoved"])
    torch.testing.assert_close(torch.autograd.grad(loss / len(mask), leaf)[0], expected["gradient"], **EXACT)
    # As a number theirs counts each reply once, ours each token.
    torch.testing.assert_close(-tensors(TRL["policy"]["inputs"])["advantages"].mean(), expected["loss"], **EXACT)


# PPO


def test_rewards_advantages_and_returns_of_ppo() -> None:
    rollout, settings = tensors(TRL["ppo"]["rollout"]), TRL["ppo"]["settings"]
    # Theirs go on to the token after the last one, where the score is.
    mask = ~rollout["padding_mask_p1"]
    assert not mask.all()
    kl = kl_estimate(rollout["logprobs"], rollout["ref_logprobs"], "k1")
    rewards = place_rewards(rollout["scores"], settings["kl_coef"] * kl, mask)
    torch.testing.assert_close(rewards, rollout["rewards"], **EXACT)
    zeros = torch.zeros(len(mask), dtype=torch.float64)
    advantages, returns = gae(rewards, rollout["values"], mask, zeros, gamma=settings["gamma"], lam=settings["lam"])
    torch.testing.assert_close(advantages, rollout["advantages"] * mask, **EXACT)
    torch.testing.assert_close(returns, rollout["returns"] * mask, **EXACT)

    tokens = ~rollout["padding_mask"]
    count = int(tokens.sum())
    bessel = (1 - 1 / count) ** 0.5
    # 1e-8 is added to another variance each: of about 0.01, hence 1e-6.
    white = whiten(rollout["advantages"], tokens) * bessel
    torch.testing.assert_close(white[tokens], rollout["whitened"][tokens], rtol=1e-5, atol=1e-6)


def test_the_clipped_losses_of_ppo() -> None:
    batch, settings = tensors(TRL["ppo"]["minibatch"]), TRL["ppo"]["settings"]
    rollout, rows = tensors(TRL["ppo"]["rollout"]), tensors(TRL["ppo"]["minibatch"])["micro_batch_inds"]
    tokens, states = (~rollout[name][rows] for name in ("padding_mask", "padding_mask_p1"))

    leaf = batch["new_logprobs"].requires_grad_()
    total, stats = policy_loss(
        leaf, batch["mb_logprobs"], batch["mb_advantage"], tokens, clip_range=settings["cliprange"], dual_clip=None
    )
    loss = total / tokens.sum()
    torch.testing.assert_close(loss, batch["pg_loss"], **EXACT)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], batch["policy_gradient"], **EXACT)
    assert stats["clip_count"] > 0

    values = batch["vpred"].requires_grad_()
    losses, clipped = value_losses(
        values, batch["mb_values"], batch["mb_return"], clip_range=settings["cliprange_value"]
    )
    loss = (losses * states).sum() / states.sum()
    torch.testing.assert_close(loss, batch["vf_loss"], **EXACT)
    torch.testing.assert_close(torch.autograd.grad(loss, values)[0], batch["value_gradient"], **EXACT)
    assert (clipped * states).sum() > 0


# Preferences


def reply_rows() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(six replies as rows, where their tokens are [6, T], leaf of logits [6, T, V])."""
    given = tensors(TRL["dpo"]["inputs"])
    there = given["attention_mask"].bool()
    lengths = there.sum(1)
    rows = {"input_ids": given["input_ids"][there], "lengths": lengths}
    rows |= {"prompt_lengths": torch.full_like(lengths, PROMPT), "ref_reply_logprobs": given["ref_logprobs"]}
    return rows, there, given["logits"].requires_grad_()


def pair_rows() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The same as three pairs."""
    flat, there, leaf = reply_rows()
    chosen, rejected = flat["lengths"].chunk(2)
    ids = flat["input_ids"].split([int(chosen.sum()), int(rejected.sum())])
    ref_chosen, ref_rejected = flat["ref_reply_logprobs"].chunk(2)
    rows = {"input_ids": ids[0], "lengths": chosen, "rejected_ids": ids[1], "rejected_lengths": rejected}
    rows |= {"prompt_lengths": flat["prompt_lengths"][:3], "ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    return rows, there, leaf


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "ipo", "hinge"])
def test_dpo_and_its_kin(loss_type: str) -> None:
    rows, there, leaf = pair_rows()
    objective = DPOObjective(DPOConfig.model_validate({"loss": loss_type, "beta": TRL["dpo"]["beta"]}))
    loss, _ = loss_of(objective, Model(leaf[there]), rows, StepTotals(rows=3.0))
    expected = tensors(TRL["dpo"]["cases"][loss_type])
    torch.testing.assert_close(loss, expected["loss"], **EXACT)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], expected["gradient"], **EXACT)


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("simpo", {"loss": "simpo", "gamma": 1.0}),
        ("simpo_smoothed", {"loss": "simpo", "gamma": 1.0, "label_smoothing": 0.1}),
        ("sigmoid_smoothed", {"loss": "sigmoid", "label_smoothing": 0.1}),
    ],
)
def test_simpo_and_smoothed_labels_without_a_reference(case: str, fields: dict[str, Any]) -> None:
    assert TRL["cpo"]["gamma"] == 1.0
    rows, there, leaf = pair_rows()
    rows = {name: column for name, column in rows.items() if not name.startswith("ref_")}
    objective = DPOObjective(DPOConfig.model_validate(fields | {"beta": TRL["cpo"]["beta"]}))
    loss, _ = loss_of(objective, Model(leaf[there]), rows, StepTotals(rows=3.0))
    expected = tensors(TRL["cpo"]["cases"][case])
    torch.testing.assert_close(loss, expected["loss"], **EXACT)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], expected["gradient"], **EXACT)


@pytest.mark.parametrize("case", ["baseline", "no_baseline"])
def test_kto_of_one_step(case: str) -> None:
    rows, there, leaf = reply_rows()
    inputs, expected = tensors(TRL["kto"]["inputs"]), tensors(TRL["kto"]["cases"][case])
    weights = TRL["kto"]["weights"]
    config = KTOConfig(beta=TRL["kto"]["beta"], desirable_weight=weights[0], undesirable_weight=weights[1])
    objective = KTOObjective(config)
    other = rows | {"input_ids": inputs["mismatched_ids"][there]}
    logprobs = objective.score(cast(HeadedLM, Model(inputs["mismatched_logits"][there])), batch(other)).reply_logprobs
    baseline = kto_baseline(logprobs - expected["mismatched_ref_logprobs"])
    assert (baseline > 0) == (case == "baseline")
    rows |= {"desirable": inputs["desirable"]}
    loss, _ = loss_of(objective, Model(leaf[there]), rows, StepTotals(rows=6.0, baseline=baseline))
    torch.testing.assert_close(loss, expected["loss"], **EXACT)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], expected["gradient"], **EXACT)
