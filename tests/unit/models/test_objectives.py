"""Objectives on a real tiny Llama in float64, against formulas over the library's own logits.

Tolerances are 1e-10 of float64 sums in another order; a token counted twice or not at all changes the second digit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.unit.models.tensors import (
    PAIRS,
    batch,
    distributions,
    gradients,
    reply_logprobs,
    rollout,
    select,
    split,
    states,
)
from xray_runtime.data.batch import StepTotals
from xray_runtime.data.ragged import Ragged
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import CriticObjective, PPOObjective
from xray_runtime.models.heads import Branch, HeadedLM
from xray_runtime.models.likelihood_objective import LikelihoodObjective
from xray_runtime.models.objectives import (
    Objective,
    Predictions,
    ReferenceObjective,
    SFTObjective,
    reply_sums,
    response_positions,
    training_loss,
)
from xray_runtime.models.padding import pad
from xray_runtime.models.reward_objective import RewardObjective

MakeLM = Callable[[int], Any]
AsRows = Callable[..., dict[str, Tensor]]

NUM_TOKENS = 4 + 1 + 2 + 3
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def headed(lm: Any, **options: Any) -> HeadedLM:
    """With a scalar head that says something."""
    module = HeadedLM(lm, scalar_head=True, **options).double()
    assert module.scalar is not None
    with torch.no_grad():
        module.scalar.weight.copy_(torch.linspace(-1, 1, module.scalar.in_features))
        module.scalar.bias.fill_(0.25)
    return module


def test_response_positions_by_hand(as_rows: AsRows) -> None:
    # Row 0 has 3 + 4 tokens: 3 to 6 are its reply. Row 1 begins at 7: 2 + 1 tokens. Row 2 has no reply, row 3 one of 1.
    rows = as_rows([*PAIRS[:2], ([4, 4], []), ([4], [6])])
    assert response_positions(batch(rows)).tolist() == [3, 4, 5, 6, 9, 13]


def test_the_sum_of_a_long_reply_is_rounded_once(as_rows: AsRows) -> None:
    """Added one after another in float32, 16,000 values would be .06 off."""
    values = -2 * torch.rand(16_000, generator=torch.Generator().manual_seed(1))
    texts = batch(as_rows([([5], [1] * 16_000), ([5], [7]), ([5], []), ([5], [1, 1])]))
    found = reply_sums(torch.cat([values, torch.tensor([0.25, -1.0, -2.0])]), texts)
    assert found.tolist() == [float(np.float32(math.fsum(values.tolist()))), 0.25, 0.0, -3.0]


def test_sft_is_cross_entropy_of_the_replies_alone(make_lm: MakeLM, as_rows: AsRows) -> None:
    lm = make_lm(1)
    module, rows = HeadedLM(lm), as_rows(PAIRS)
    loss, stats = training_loss(module, SFTObjective(), batch(rows), StepTotals(tokens=10.0))
    # The library's shifted labels, -100 where nothing is asked.
    ids = pad(rows["input_ids"], rows["lengths"])
    labels = torch.full_like(ids, -100)
    for i, (prompt, reply) in enumerate(PAIRS):
        labels[i, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    logits = lm(input_ids=ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    assert (labels != -100).sum() == NUM_TOKENS == 10
    torch.testing.assert_close(loss, expected / 10, **EXACT)
    torch.testing.assert_close(stats["nll"], expected.detach(), **EXACT)
    wanted = gradients(module, expected / 10)
    for name, gradient in gradients(module, loss).items():
        torch.testing.assert_close(gradient, wanted[name], **EXACT)


def test_a_masked_row_is_each_reply_given_all_before_it(make_lm: MakeLM, as_rows: AsRows) -> None:
    """A conversation of two turns in one row: the sum of its turns scored one by one, and the gradient of it."""
    lm = make_lm(1)
    module, asked, between = HeadedLM(lm), [5, 9, 7], [2, 8, 30]
    first, second = [42, 11, 1], [3, 6, 60, 1]
    rows = as_rows([(asked, [*first, *between, *second]), ([8, 100], [3, 1])])
    rows["response_mask"] = torch.tensor([True] * 3 + [False] * 3 + [True] * 6)
    parts = [
        -reply_logprobs(lm, asked, first).sum() - reply_logprobs(lm, [*asked, *first, *between], second).sum(),
        -reply_logprobs(lm, [8, 100], [3, 1]).sum(),
    ]
    got = SFTObjective().score(module, batch(rows)).nll
    assert got.tolist() == pytest.approx([part.item() for part in parts], rel=1e-10)
    loss, stats = training_loss(module, SFTObjective(), batch(rows), StepTotals(tokens=9.0))
    torch.testing.assert_close(loss, (parts[0] + parts[1]) / 9, **EXACT)
    torch.testing.assert_close(stats["nll"], (parts[0] + parts[1]).detach(), **EXACT)
    wanted = gradients(module, (parts[0] + parts[1]) / 9)
    for name, gradient in gradients(module, loss).items():
        # The norms sum gradients in float32, over one row here and over two there.
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-6)


def test_logprobs_are_taken_at_the_temperature(make_lm: MakeLM, as_rows: AsRows) -> None:
    lm = make_lm(1)
    got = ReferenceObjective(0.7).score(HeadedLM(lm), batch(as_rows(PAIRS))).ref_logprobs
    config = PPOStageConfig(temperature=0.7)
    scores = PPOObjective(config).score(HeadedLM(lm), batch(as_rows(PAIRS)))
    assert torch.equal(scores.logprobs.values, got.values)
    for row, (prompt, reply) in zip(split(scores.entropy), PAIRS, strict=True):
        logits = lm(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1].double() / 0.7
        expected = torch.distributions.Categorical(logits=logits).entropy()
        assert row.tolist() == pytest.approx(expected.tolist(), rel=1e-10)
    assert got.lengths.tolist() == [4, 1, 2, 3]
    for row, (prompt, reply) in zip(split(got), PAIRS, strict=True):
        assert row.tolist() == pytest.approx(reply_logprobs(lm, prompt, reply, 0.7).tolist(), rel=1e-10)


def test_values_belong_to_the_state_before_each_token(make_lm: MakeLM, as_rows: AsRows) -> None:
    module = headed(make_lm(1))
    got = CriticObjective(PPOStageConfig()).score(module, batch(as_rows(PAIRS)))
    for i, (prompt, reply) in enumerate(PAIRS):
        expected = (states(module, prompt, reply) @ torch.linspace(-1, 1, 32).double() + 0.25).tolist()
        assert split(got.values)[i].tolist() == pytest.approx(expected[:-1], rel=1e-10)
        assert got.final_values[i].item() == pytest.approx(expected[-1], rel=1e-10)


def test_the_pairwise_loss_by_hand(make_lm: MakeLM, as_rows: AsRows) -> None:
    module = headed(make_lm(1))
    chosen, rejected = as_rows(PAIRS[:3]), as_rows([PAIRS[3], PAIRS[0], PAIRS[2]])
    rows = chosen | {"rejected_ids": rejected["input_ids"], "rejected_lengths": rejected["lengths"]}
    loss, stats = training_loss(module, RewardObjective(), batch(rows), StepTotals(rows=6.0))
    score = [float(states(module, p, r)[-1] @ torch.linspace(-1, 1, 32).double()) for p, r in PAIRS]
    # -log sigmoid(m) = log(1 + e^-m); the third pair is a reply against itself: log 2 and half a point.
    margins = [score[0] - score[3], score[1] - score[0], 0.0]
    expected = sum(math.log1p(math.exp(-m)) for m in margins)
    assert stats["loss"].item() == pytest.approx(expected, rel=1e-10)
    assert loss.item() == pytest.approx(expected / 6, rel=1e-10)
    assert stats["correct"].item() == sum(m > 0 for m in margins) + 0.5


@pytest.mark.parametrize("trainable", [None, 1])
def test_scores_ignore_neighbours(make_lm: MakeLM, as_rows: AsRows, trainable: int | None) -> None:
    module = headed(make_lm(1), trainable_layers=trainable)
    config = PPOStageConfig(temperature=0.7)
    objectives = [SFTObjective(), RewardObjective(), ReferenceObjective(0.7), CriticObjective(config)]
    for objective in [*objectives, PPOObjective(config)]:
        together = objective.score(module, batch(as_rows(PAIRS)))
        for i, pair in enumerate(PAIRS):
            for name, score in objective.score(module, batch(as_rows([pair]))).columns().items():
                row = together.columns()[name]
                ours, alone = (split(row)[i], score.values) if isinstance(row, Ragged) else (row[i], score[0])
                torch.testing.assert_close(ours, alone, **EXACT)


def test_the_policy_gradient_theorem_holds_on_policy(make_lm: MakeLM, as_rows: AsRows) -> None:
    """Where nothing has moved, the gradient of PPO's loss is −Σ w A ∇ log π / N: no ratio, no clip to be seen."""
    lm = make_lm(1)
    config = PPOStageConfig(temperature=0.7)
    module, rows = HeadedLM(lm), rollout(as_rows(PAIRS), seed=3)
    rows["old_logprobs"] = PPOObjective(config).score(module, batch(rows)).logprobs.values.detach()
    loss, stats = training_loss(module, PPOObjective(config), batch(rows), StepTotals(tokens=10.0))
    total = torch.zeros((), dtype=torch.float64)
    weighted = (rows["weights"] * rows["advantages"]).split([len(reply) for _, reply in PAIRS])
    for (prompt, reply), a in zip(PAIRS, weighted, strict=True):
        total = total - (a * reply_logprobs(lm, prompt, reply, 0.7)).sum()
    wanted = gradients(module, total / 10)
    for name, gradient in gradients(module, loss).items():
        torch.testing.assert_close(gradient, wanted[name], **EXACT)
    assert stats["clip_count"] == stats["dual_clip_count"] == stats["approx_kl_sum"] == 0


@pytest.mark.parametrize(
    ("fields", "totals", "expected"),
    [
        ({}, StepTotals(tokens=4.0), 0.5485809),
        ({"loss_mean": "replies"}, StepTotals(rows=2.0), -0.0414137),
        ({"loss": "gspo", "loss_mean": "replies"}, StepTotals(rows=2.0), -0.0581159),
        ({"loss": "cispo", "clip_range_high": 4.0}, StepTotals(tokens=4.0), -0.5667855),
        ({"loss_mean": "fixed", "max_new_tokens": 4}, StepTotals(rows=2.0), 0.5485809 * 4 / 8),
    ],
    ids=["tokens", "replies", "gspo", "cispo", "fixed"],
)
def test_losses_and_their_means_by_hand(
    monkeypatch: pytest.MonkeyPatch,
    make_lm: MakeLM,
    as_rows: AsRows,
    fields: dict[str, Any],
    totals: StepTotals,
    expected: float,
) -> None:
    """Replies of one and of three tokens, A = 1 and −1, log-probabilities and ratios as in the test."""
    logprobs, moved = torch.tensor([-1.0, -1, -2, -0.5]).double(), torch.tensor([0.2, 0.1, -0.2, 0.4]).double()
    monkeypatch.setattr(
        "xray_runtime.methods.ppo.objectives.response_predictions",
        lambda *_: Predictions(logprobs, torch.zeros_like(logprobs), None, None),
    )
    rows = as_rows([([5], [6]), ([5, 6], [7, 8, 9])])
    rows |= {"old_logprobs": logprobs - moved, "advantages": torch.tensor([1.0, -1, -1, -1]).double()}
    rows["weights"] = torch.ones(4).double()
    config = PPOStageConfig(**({"clip_range_high": 0.28, "dual_clip": None} | fields))
    loss, _ = training_loss(HeadedLM(make_lm(1)), PPOObjective(config), batch(rows), totals)
    assert loss.item() == pytest.approx(expected, abs=1e-7)


def test_entropy_and_value_terms_are_added_with_their_weights(make_lm: MakeLM, as_rows: AsRows) -> None:
    lm = make_lm(1)
    rows = rollout(as_rows(PAIRS), seed=4)
    module = headed(lm)
    rows["values"] = CriticObjective(PPOStageConfig()).score(module, batch(rows)).values.values.detach()
    both = PPOStageConfig(entropy_coef=0.3, value_coef=0.7)
    loss, stats = training_loss(module, PPOObjective(both), batch(rows), StepTotals(tokens=10.0))
    # With the value head at its old values nothing is clipped: ½ (V − R)².
    value = 0.5 * sum(float(error) ** 2 for error in rows["values"] - rows["returns"])
    entropy = 0.0
    for prompt, reply in PAIRS:
        logp = distributions(lm, prompt, reply).detach()
        entropy -= float((logp.exp() * logp).sum())
    assert stats["value_loss"].item() == pytest.approx(value, rel=1e-10)
    assert stats["entropy_sum"].item() == pytest.approx(entropy, rel=1e-10)
    expected = stats["policy_loss"].item() - 0.3 * entropy + 0.7 * value
    assert loss.item() == pytest.approx(expected / 10, rel=1e-10)
    # Without a head there is neither.
    plain, stats = training_loss(HeadedLM(lm), PPOObjective(PPOStageConfig()), batch(rows), StepTotals(tokens=10.0))
    assert plain.item() == pytest.approx(stats["policy_loss"].item() / 10, rel=1e-10)
    assert "value_loss" not in stats


def test_a_separate_critic_learns_what_a_shared_one_learns(make_lm: MakeLM, as_rows: AsRows) -> None:
    lm = make_lm(1)
    module, rows = headed(lm), rollout(as_rows(PAIRS), seed=5)
    shared = PPOStageConfig(value_coef=1.0)
    silent = rows | {"weights": torch.zeros_like(rows["weights"])}
    in_policy = gradients(
        module, training_loss(module, PPOObjective(shared), batch(silent), StepTotals(tokens=10.0))[0]
    )
    loss, stats = training_loss(module, CriticObjective(shared), batch(rows), StepTotals(tokens=10.0))
    for name, gradient in gradients(module, loss).items():
        torch.testing.assert_close(gradient, in_policy[name], **EXACT)
    assert 0 < stats["value_clip_count"] < NUM_TOKENS


def test_likelihood_of_a_reply_and_whether_it_is_the_greedy_one(make_lm: MakeLM, as_rows: AsRows) -> None:
    lm = make_lm(1)
    module = headed(lm)
    greedy = [8, 100]
    for _ in range(3):
        greedy.append(int(distributions(lm, greedy[:1], [*greedy[1:], 0])[-1].argmax()))
    pairs = [*PAIRS, (greedy[:2], greedy[2:]), (greedy[:2], [*greedy[2:4], (greedy[4] + 1) % 100])]
    found = LikelihoodObjective().score(module, batch(as_rows(pairs)))
    expected = torch.stack([reply_logprobs(lm, *pair).sum() for pair in pairs])
    torch.testing.assert_close(found.loglikelihood, expected.float())
    # All but its last token are the likeliest in the last row too.
    assert found.greedy[-2:].tolist() == [1.0, 0.0]
    # Called as before, the output layer gives logits as before.
    layer, states = module.lm.get_output_embeddings(), torch.ones(2, module.lm.config.hidden_size).to(lm.dtype)
    torch.testing.assert_close(layer(states), torch.nn.functional.linear(states, layer.weight, layer.bias))


OBJECTIVES: list[tuple[str, Objective]] = [
    ("tokens", SFTObjective()),
    ("tokens", PPOObjective(PPOStageConfig(entropy_coef=0.1))),
    ("tokens", CriticObjective(PPOStageConfig())),
    ("rows", RewardObjective()),
]


@pytest.mark.parametrize(("unit", "objective"), OBJECTIVES, ids=[type(o).__name__ for _, o in OBJECTIVES])
@settings(max_examples=8)
@given(order=st.permutations(range(4)), cuts=st.sets(st.integers(1, 3)))
def test_no_split_shows_in_the_gradient(
    make_lm: MakeLM,
    as_rows: AsRows,
    unit: str,
    objective: Objective,
    order: list[int],
    cuts: set[int],
) -> None:
    module = headed(make_lm(1))
    totals = StepTotals(**{unit: 10.0})
    rejected = as_rows(PAIRS[::-1])
    rows = rollout(as_rows(PAIRS), seed=6)
    if unit == "rows":
        rows |= {"rejected_ids": rejected["input_ids"], "rejected_lengths": rejected["lengths"]}
    loss, stats = training_loss(module, objective, batch(rows), totals)
    whole = gradients(module, loss)
    edges = [0, *sorted(cuts), 4]
    micro = [order[a:b] for a, b in pairwise(edges)]
    parts = [training_loss(module, objective, batch(select(rows, m)), totals) for m in micro]
    of_parts = [gradients(module, part) for part, _ in parts]
    assert sum(part.item() for part, _ in parts) == pytest.approx(loss.item(), rel=1e-10)
    for name, gradient in whole.items():
        torch.testing.assert_close(sum(part[name] for part in of_parts), gradient, **EXACT)
    for name, value in stats.items():
        torch.testing.assert_close(sum(part[name] for _, part in parts), value, **EXACT)
    assert whole["lm.model.layers.0.mlp.up_proj.weight"].abs().max() > 1e-6


def test_branches_score_as_their_models_alone(make_lm: MakeLM, as_rows: AsRows) -> None:
    def with_other_top(factor: float) -> Any:
        lm = make_lm(1)
        with torch.no_grad():
            lm.model.layers[2].mlp.down_proj.weight.mul_(factor)
        return lm

    config, rows = PPOStageConfig(temperature=0.7), as_rows(PAIRS)
    judge = headed(with_other_top(0.5))
    assert judge.scalar is not None
    alone = ReferenceObjective(0.7).score(HeadedLM(with_other_top(1.5)), batch(rows))
    whole = PPOObjective(config).score(headed(make_lm(1)), batch(rows))
    # Reward models read an end token that some of the sampled replies lack.
    added = [number % 2 == 0 for number in range(len(PAIRS))]
    pairs = zip(added, PAIRS, strict=True)
    ended = as_rows([(prompt, [*reply, 3] if add else reply) for add, (prompt, reply) in pairs])
    scores = RewardObjective().score(judge, batch(ended)).scores
    branches = [
        Branch("reference", with_other_top(1.5)),
        Branch("rewards.0", with_other_top(0.5), copy.deepcopy(judge.scalar)),
    ]
    module = headed(make_lm(1), trainable_layers=1, branches=branches)
    ended |= {"trunk": module.trunk(ended["input_ids"], ended["lengths"]), "added_ends": torch.tensor(added)}
    got = PPOObjective(config).score(module, batch(ended))
    expected = whole.with_columns(**alone.columns(), **{"rewards.0": scores}).columns()
    assert got.columns().keys() == expected.keys()
    for name, value in expected.items():
        ours, theirs = (of.values if isinstance(of, Ragged) else of for of in (got.columns()[name], value))
        torch.testing.assert_close(ours, theirs, **EXACT)
    assert (got.logprobs.values - got.ref_logprobs.values).abs().max() > 1e-3
    assert scores.detach().diff().abs().min() > 1e-3


def test_a_row_without_a_reply_counts_nothing(make_lm: MakeLM, as_rows: AsRows) -> None:
    module = headed(make_lm(1))
    empty = rollout(as_rows([([5, 6], [])]), seed=1)
    both = rollout(as_rows([*PAIRS[:2], ([5, 6], []), *PAIRS[2:]]), seed=1)
    for objective in (
        SFTObjective(),
        PPOObjective(PPOStageConfig(entropy_coef=0.1)),
        CriticObjective(PPOStageConfig()),
    ):
        loss, stats = training_loss(module, objective, batch(empty), StepTotals(tokens=10.0))
        assert loss.item() == 0.0
        assert not any(value.any() for value in stats.values())
        assert not any(gradient.any() for gradient in gradients(module, loss).values())
        with_it, _ = training_loss(module, objective, batch(both), StepTotals(tokens=10.0))
        without, _ = training_loss(module, objective, batch(select(both, [0, 1, 3, 4])), StepTotals(tokens=10.0))
        torch.testing.assert_close(with_it, without, **EXACT)


def test_the_gradient_is_the_slope(make_lm: MakeLM, as_rows: AsRows) -> None:
    """Finite differences through the whole model, at the head and at the final norm."""
    module, rows = headed(make_lm(1)), rollout(as_rows(PAIRS), seed=9)
    objective = PPOObjective(PPOStageConfig(entropy_coef=0.1))
    assert module.scalar is not None
    inputs = (module.lm.model.norm.weight, module.scalar.weight, module.scalar.bias)
    assert torch.autograd.gradcheck(
        lambda *_: training_loss(module, objective, batch(rows), StepTotals(tokens=10.0))[0], inputs
    )


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("mean", ["tokens", "replies"])
def test_tokens_between_turns_have_no_gradient(make_lm: MakeLM, as_rows: AsRows, loss: str, mean: str) -> None:
    """Whatever stands in its columns, and however unlikely its tokens are, the gradient is the same, bit for bit."""
    config = PPOStageConfig(
        loss=loss, loss_mean=mean, entropy_coef=0.1, kl={"place": "loss", "coef": 0.3}, whiten_advantages=False
    )
    module = headed(make_lm(1))
    rows = as_rows([([5, 9, 7], [42, 11, 1, 2, 8, 30, 3, 6, 1]), ([8, 100], [3, 1])])
    mask = torch.tensor([True] * 3 + [False] * 3 + [True] * 5)
    rows["response_mask"] = mask
    generator = torch.Generator().manual_seed(0)
    for name in ("old_logprobs", "ref_logprobs", "advantages", "weights", "values", "returns"):
        rows[name] = torch.rand(len(mask), generator=generator, dtype=torch.float64)
    totals = StepTotals(tokens=8.0, rows=2.0, kl_coef=0.3)

    def found(changed: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        value, stats = training_loss(module, PPOObjective(config), batch(changed), totals)
        return value, stats, gradients(module, value)

    loss_before, stats_before, before = found(rows)
    names = ("old_logprobs", "ref_logprobs", "advantages", "weights", "values", "returns")
    loss_after, stats_after, after = found(rows | {name: torch.where(mask, rows[name], 7.0) for name in names})
    assert torch.equal(loss_before, loss_after)
    assert all(torch.equal(stats_before[name], stats_after[name]) for name in stats_before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    _, _, unmasked = found({name: column for name, column in rows.items() if name != "response_mask"})
    assert not all(torch.equal(before[name], unmasked[name]) for name in before)
