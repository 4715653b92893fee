"""Each preset against numbers worked out by hand, in float64, and what it declares against what it does."""

from __future__ import annotations

import importlib
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import xray
from tests.message_texts import Messages
from xray_runtime.algorithms.checking import advantage_reads, check_advantages, check_loss, loss_reads
from xray_runtime.algorithms.chosen_tokens import RolloutTokens, covariances
from xray_runtime.algorithms.estimators import AdvantageInputs
from xray_runtime.algorithms.importance import importance_weights
from xray_runtime.algorithms.losses import PolicyLossInputs, TokenLoss, token_loss
from xray_runtime.algorithms.rewards import MovingMeans
from xray_runtime.algorithms.trust_regions import binary_kl
from xray_runtime.data.batch import PolicyBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.methods.ppo.config import PPOConfig, PPOStageConfig
from xray_runtime.methods.ppo.functions import Functions
from xray_runtime.methods.ppo.objectives import Observations, PolicyForward, PolicyGradient, PPOObjective
from xray_runtime.methods.ppo.preset import PRESETS
from xray_runtime.methods.ppo.published import METHODS, Method
from xray_runtime.methods.ppo.update import step_totals

ROOT = Path(__file__).parents[4]
LOSSES = [name for name in PRESETS if PRESETS.get(name).loss]
ESTIMATORS = [name for name in PRESETS if PRESETS.get(name).advantages]
SMOOTH = ["drpo", "gmpo", "kl_cov", "sapo"]
"""Without a gradient that is stopped on purpose."""


NO_HEAD: Any = SimpleNamespace(scalar=None)


def number(value: float) -> Any:
    return pytest.approx(value, abs=1e-7)


def of_tokens(
    name: str,
    new: list[float],
    old: list[float],
    advantages: list[float],
    replies: list[int] | None = None,
    chosen: list[bool] | None = None,
) -> tuple[list[float], list[float]]:
    """(loss of each token, gradient of their sum to each log-probability) at these probabilities; `old` are the
    sampler's, and the trainer's before the update."""
    config = PPOStageConfig(**PRESETS.get(name).fields)  # type: ignore[arg-type]
    logprobs = torch.tensor(new, dtype=torch.float64).log().requires_grad_()
    before = torch.tensor(old, dtype=torch.float64).log()
    high = config.clip_range if config.clip_range_high is None else config.clip_range_high
    tokens = PolicyLossInputs(
        logprobs,
        torch.tensor(advantages, dtype=torch.float64),
        torch.ones(len(new), dtype=torch.float64),
        torch.tensor(replies or range(len(new))),
        config.clip_range,
        high,
        config.dual_clip,
        {"old_logprobs": before, "rollout_logprobs": before, "chosen": torch.tensor(chosen or [False] * len(new))},
    )
    loss = PRESETS.get(name).loss
    assert loss is not None
    made = token_loss(loss, tokens, name).loss
    (gradient,) = torch.autograd.grad(made.sum(), logprobs)
    return made.tolist(), gradient.tolist()


@pytest.mark.parametrize(
    ("name", "new", "old", "advantage", "loss", "gradient"),
    [
        # π − μ = .25 > .15, and A would raise it further: dropped. Back towards μ, it is kept: ρ = 1.5.
        ("dppo_tv", 0.75, 0.5, 1.0, 0.0, 0.0),
        ("dppo_tv", 0.75, 0.5, -1.0, 1.5 * math.log(0.75), 1.5),
        ("dppo_tv", 0.25, 0.5, -1.0, 0.0, 0.0),
        # A rare token may grow threefold; ρ = 50 counts as 20.
        ("dppo_tv", 0.03, 0.01, 1.0, -3 * math.log(0.03), -3.0),
        ("dppo_tv", 0.5, 0.01, -1.0, 20 * math.log(0.5), 20.0),
        # D = .1438410 > .05; .5 ln(.5/.55) + .5 ln(.5/.45) = .0050252 is not.
        ("dppo_kl", 0.75, 0.5, 1.0, 0.0, 0.0),
        ("dppo_kl", 0.75, 0.5, -1.0, 1.5 * math.log(0.75), 1.5),
        ("dppo_kl", 0.55, 0.5, 1.0, -1.1 * math.log(0.55), -1.1),
        ("dppo_kl", 0.25, 0.5, -1.0, 0.0, 0.0),
        ("dppo_kl", 0.25, 0.5, 1.0, -0.5 * math.log(0.25), -0.5),
        # ln 1.5 = .4054651, its square .1644020; ln 1.8 = .5877867, its square .3454932; twice that times τ is added.
        ("prime_rl", 0.75, 0.5, 1.0, -1.5 * math.log(0.75) + 0.1644020e-3, -1.5 + 0.8109302e-3),
        ("prime_rl", 0.9, 0.5, 1.0, 0.3454932e-3, 1.1755733e-3),
        ("prime_rl", 0.9, 0.5, -1.0, 0.3454932e-3, 1.1755733e-3),
        # ρ = 30 counts in full: ln 30 = 3.4011974, its square 11.5681437.
        ("prime_rl", 0.3, 0.01, 1.0, -30 * math.log(0.3) + 11.5681437e-3, -30 + 6.8023948e-3),
        # −1.5 + .5 · .5² / 25 = −1.495; ρ (−A + |A| (π − μ) / δ) = 1.5 (−1 + .25 / 12.5) = −1.47.
        ("drpo", 0.75, 0.5, 1.0, -1.495, -1.47),
        ("drpo", 0.25, 0.5, -1.0, 0.505, 0.49),
        ("drpo", 0.75, 0.5, 2.0, -2.99, -2.94),
        # 4 σ(0) = 2 with slope 4 · ¼; 4 σ(1) = 2.9242343 with slope 4 · .1966119 · 2; (4 / 1.05) σ(0) = 1.9047619.
        ("sapo", 0.5, 0.5, 1.0, -2.0, -1.0),
        ("sapo", 0.8, 0.4, 1.0, -2.9242343, -1.5728955),
        ("sapo", 0.5, 0.5, -1.0, 1.9047619, 1.0),
        ("sapo", 0.8, 0.4, 2.0, -5.8484686, -3.1457909),
        # One token: W = 1.5, φ = 1.5² e^{3 (1 − 1.5)} = 2.25 · .2231302 = .5020429; A < 0: 3.375 e^{−1} = 1.2415931.
        ("vespo", 0.75, 0.5, 1.0, -0.5020429 * math.log(0.75), -0.5020429),
        ("vespo", 0.75, 0.5, -1.0, 1.2415931 * math.log(0.75), 1.2415931),
    ],
)
def test_the_loss_of_a_token(name: str, new: float, old: float, advantage: float, loss: float, gradient: float) -> None:
    found = of_tokens(name, [new], [old], [advantage])
    assert found == ([number(loss)], [number(gradient)])


def test_drpo_has_no_gradient_at_its_boundary() -> None:
    """π − μ = δ = .25."""
    loss = PRESETS.get("drpo").loss
    assert loss is not None
    logprobs = torch.tensor([math.log(0.75)], dtype=torch.float64, requires_grad=True)
    given = torch.ones(1, dtype=torch.float64)
    streams = {"rollout_logprobs": torch.tensor([math.log(0.5)], dtype=torch.float64)}
    made = loss(PolicyLossInputs(logprobs, given, given, torch.tensor([0]), 0.2, 0.25, None, streams))
    assert isinstance(made, Tensor)
    assert torch.autograd.grad(made.sum(), logprobs)[0].item() == number(0.0)


def from_ratios(ratios: list[float]) -> tuple[list[float], list[float]]:
    """(new, old) probabilities with these log-ratios."""
    return [0.3 * math.exp(r) for r in ratios], [0.3] * len(ratios)


def test_gmpo_of_a_reply() -> None:
    # A > 0: log-ratios .1, −.2 and .6, cut to .4: mean .1. The cut one has no gradient; the others −e^{.1} · 3 / 3.
    losses, gradient = of_tokens("gmpo", *from_ratios([0.1, -0.2, 0.6]), [1.0] * 3, [0, 0, 0])
    assert losses == [number(-1.1051709)] * 3
    assert gradient == [number(-1.1051709), number(-1.1051709), number(0.0)]
    # A < 0: .1, −.2 and −.6, cut to −.4: mean −.1666667.
    losses, gradient = of_tokens("gmpo", *from_ratios([0.1, -0.2, -0.6]), [-1.0] * 3, [0, 0, 0])
    assert (losses, gradient[2]) == ([number(0.8464817)] * 3, number(0.0))
    loss = PRESETS.get("gmpo").loss
    assert loss is not None
    new, ones = torch.tensor([0.1, 0.5, -0.5]), torch.ones(3)
    made = loss(PolicyLossInputs(new, ones, ones, torch.arange(3), 0.4, 0.4, None, {"old_logprobs": torch.zeros(3)}))
    assert isinstance(made, TokenLoss)
    assert made.clipped is not None
    assert made.clipped.tolist() == [False, True, False]


def test_vespo_of_a_reply() -> None:
    # ln W = .3, W = 1.3498588: φ = e^{.6 + 3 (1 − 1.3498588)} = e^{−.4495764} = .6378981; the other reply is by itself.
    _, gradient = of_tokens("vespo", *from_ratios([0.1, -0.2, 0.4, 0.0]), [1.0] * 4, [0, 0, 0, 1])
    assert gradient == [number(-0.6378983)] * 3 + [number(-1.0)]
    # An advantage below 1 is one too. W is at least 1e-8: φ = 1e-16 e^3.
    _, gradient = of_tokens("vespo", *from_ratios([math.log(1.5)]), [0.5])
    assert gradient == [number(-0.2510214)]
    _, gradient = of_tokens("vespo", *from_ratios([-15.0, -15.0]), [1.0] * 2, [0, 0])
    assert gradient == [pytest.approx(-2.0085536e-15, rel=1e-6, abs=0.0)] * 2


def test_covariances_of_a_rollout() -> None:
    # log π: −1, −2, −3 and −6, mean −3; A: 1, −1, 2 and 2, mean 1. What is not counted is in no mean.
    logprobs = torch.tensor([[-1.0, -2.0, -99.0], [-3.0, -6.0, -99.0]])
    worth = torch.tensor([[1.0, -1.0, 50.0], [2.0, 2.0, 50.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    tokens = RolloutTokens(logprobs, worth, mask, [3, 4])
    assert covariances(tokens).tolist() == [[0.0, -2.0, 0.0], [0.0, -3.0, 0.0]]
    tokens = RolloutTokens(logprobs, -worth, mask, [3, 4])
    assert covariances(tokens).tolist() == [[0.0, 2.0, 0.0], [0.0, 3.0, 0.0]]
    # One of four tokens, since 0.2% of them is none: the largest; of those in [1, 5], the one that is drawn.
    kl_cov, clip_cov = PRESETS.get("kl_cov").chooses, PRESETS.get("clip_cov").chooses
    assert kl_cov is not None
    assert clip_cov is not None
    assert kl_cov(tokens).tolist() == [[False, False, False], [False, True, False]]
    drawn = tokens.draws()[:, 1]
    assert clip_cov(tokens).tolist() == [[False, i == int(drawn.argmin()), False] for i in range(2)]
    # Replies without a difference give nothing to choose, and 12.5 is beyond ω_high.
    alike = RolloutTokens(logprobs, torch.ones_like(worth), mask, [3, 4])
    assert not kl_cov(alike).any()
    assert not clip_cov(alike).any()
    far = RolloutTokens(torch.tensor([[-1.0, -11.0]]), torch.tensor([[5.0, 0.0]]), torch.ones(1, 2).bool(), [3])
    assert covariances(far).tolist() == [[12.5, 12.5]]
    assert not clip_cov(far).any()
    assert kl_cov(far).tolist() == [[True, True]]  # equal ones go together


def test_the_share_of_chosen_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    logprobs, worth = -torch.rand(500, 20, generator=draw), torch.randn(500, 20, generator=draw) * 4
    tokens = RolloutTokens(logprobs, worth, torch.ones(500, 20).bool(), range(500))
    kl_cov, clip_cov = PRESETS.get("kl_cov").chooses, PRESETS.get("clip_cov").chooses
    assert kl_cov is not None
    assert clip_cov is not None
    found = covariances(tokens)
    assert int(kl_cov(tokens).sum()) == 20  # of 10,000
    assert found[kl_cov(tokens)].min() > found[~kl_cov(tokens)].max()
    assert int(clip_cov(tokens).sum()) == 2
    assert ((found[clip_cov(tokens)] >= 1) & (found[clip_cov(tokens)] <= 5)).all()
    other = RolloutTokens(logprobs, worth, tokens.mask, range(1, 501))
    assert (clip_cov(other) != clip_cov(tokens)).any()


def test_losses_of_chosen_tokens() -> None:
    # ρ = 1.5, ln 1.5 = .4054651, and ρ = ½, ln ½ = −.6931472: a chosen one is held back by |log ρ|, slope ±1.
    new, old = [0.75, 0.75, 0.25, 0.25], [0.5] * 4
    losses, gradient = of_tokens("kl_cov", new, old, [1.0, 1.0, -1.0, -1.0], chosen=[False, True, False, True])
    assert losses == [number(-1.5), number(-1.0945349), number(0.5), number(1.1931472)]
    assert gradient == [number(-1.5), number(-0.5), number(0.5), number(-0.5)]
    losses, gradient = of_tokens("clip_cov", new, old, [1.0, 1.0, -1.0, -1.0], chosen=[False, True, False, True])
    assert losses == [number(-1.5), number(0.0), number(0.5), number(0.0)]
    assert gradient == [number(-1.5), number(0.0), number(0.5), number(0.0)]
    # ρ = 3 is clipped at 2 where A > 0; ρ = 1/50 nowhere.
    losses, gradient = of_tokens("clip_cov", [0.9, 0.01], [0.3, 0.5], [1.0, -1.0])
    assert (losses, gradient) == ([number(-2.0), number(0.02)], [number(0.0), number(0.02)])


class Predicted(PolicyForward):
    """A forward pass with these log-probabilities."""

    def __init__(self, rows: PolicyBatch[Tensor], config: PPOStageConfig, logprobs: Tensor) -> None:
        self.rows, self._config, self.hidden = rows, config, logprobs.detach()  # type: ignore[misc, assignment]
        self._predicted = SimpleNamespace(logprobs=logprobs)  # type: ignore[assignment]


def test_echo_is_grpo_plus_the_cross_entropy_of_what_was_read() -> None:
    """Two replies of 3 and 4 tokens, of which 1 and 2 were read; split by replies, as a rank may have."""
    mask = [[True, False, True], [True, False, False, True]]
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -1.0, -3.0, -0.25, -2.0], dtype=torch.float64).requires_grad_()
    offsets, worth = torch.tensor([0, 3, 7]), torch.tensor([1.0, 0.0, 1.0, -1.0, 0.0, 0.0, -1.0]).double()
    config = PPOStageConfig(method="echo", environment={"path": "module:Environment"})  # type: ignore[arg-type]
    [observations] = [c for c in PPOObjective(config).components(NO_HEAD) if isinstance(c, Observations)]

    def forward(rows: slice, tokens: slice) -> Predicted:
        text = TextBatch.of([[7], [7]][rows], [[1] * 3, [1] * 4][rows])
        part = offsets[rows.start : rows.stop + 1] - offsets[rows.start]
        given = {
            "response_mask": Ragged(torch.tensor([*chain(*mask[rows])]), part),
            "old_logprobs": Ragged(logprobs.detach()[tokens], part),
            "advantages": Ragged(worth[tokens], part),
            "weights": Ragged(torch.ones_like(worth)[tokens], part),
        }
        batch = text.map(torch.from_numpy).as_kind(PolicyBatch, **given)  # type: ignore[arg-type]
        return Predicted(batch, config, logprobs[tokens])  # type: ignore[arg-type]

    whole = forward(slice(0, 2), slice(0, 7))
    totals = step_totals(config, whole.rows.map(lambda x: x.numpy()), 0.0)  # type: ignore[arg-type, attr-defined]
    assert (totals.tokens, totals.counts) == (4.0, {"observations": 3.0})
    made = observations.terms(whole, totals)
    # (2 + 3 + .25) / 3 = 1.75, times λ = .1.
    assert observations.coef(totals) * float(made.sum().detach()) / observations.count(totals) == number(0.175)
    (gradient,) = torch.autograd.grad(made.sum(), logprobs)
    assert gradient.tolist() == [0.0, -1.0, 0.0, 0.0, -1.0, -1.0, 0.0]
    parts = forward(slice(0, 1), slice(0, 3)), forward(slice(1, 2), slice(3, 7))
    assert sum(float(observations.terms(part, totals).sum().detach()) for part in parts) == number(5.25)
    # The policy gradient has its own count, which what was read leaves alone: ρ = 1, so −A, 1 + 1 − 1 − 1 over 4.
    loss = PolicyGradient(config)
    assert float(loss.terms(whole, totals).sum().detach()) == number(0.0)
    assert loss.count(totals) == 4.0
    (gradient,) = torch.autograd.grad(loss.terms(whole, totals).sum(), logprobs)
    assert gradient.tolist() == [-1.0, 0.0, -1.0, 1.0, 0.0, 0.0, 1.0]
    # Episodes of one turn each.
    assert observations.coef(StepTotals(tokens=4.0, rows=2.0, counts={"observations": 0.0})) == 0.0


def test_echo_needs_an_environment(message_texts: Messages) -> None:
    with message_texts.raises(ConfigError):
        validate_as(PPOStageConfig, {"method": "echo"})
    # A reply that is left out of the loss is no observation.
    with message_texts.raises(ConfigError):
        validate_as(PPOConfig, {"method": "echo", "environment": {"agent": "a:b", "untrainable": "leave_out"}})


def test_what_no_method_chooses_is_not_read(message_texts: Messages) -> None:
    def mine(tokens: PolicyLossInputs) -> Tensor:
        return -tokens.advantages * tokens.logprobs * tokens.chosen

    with message_texts.raises(ValueError):
        Functions.of(PPOStageConfig(loss="mine:mine"), loss=mine)


def test_luspo_counts_a_reply_once_for_each_token() -> None:
    fields = PRESETS.get("luspo").fields
    assert (fields["loss"], fields["loss_mean"]) == ("gspo", "fixed")  # Σ over tokens of what a reply's tokens share


def test_icepop_drops_on_both_sides() -> None:
    train = torch.tensor([[1.0, 3.0, 0.5, 100.0, 0.4]], dtype=torch.float64).log()
    fields = PRESETS.get("icepop").fields
    found, stats = importance_weights(
        train,
        torch.zeros_like(train),
        torch.ones_like(train),
        mode=fields["importance_correction"],
        cap=fields["importance_cap"],
        floor=fields["importance_floor"] - 1e-12,
    )
    torch.testing.assert_close(found, torch.tensor([[1.0, 3.0, 0.5, 0.0, 0.0]], dtype=torch.float64))
    assert stats["capped_share"] == pytest.approx(0.4)


def test_binary_kl() -> None:
    mu, pi = torch.tensor([0.5, 0.2, 1.0]).double(), torch.tensor([0.75, 0.2, 0.999]).double()
    assert binary_kl(mu.log(), pi.log()).tolist() == [number(0.1438410), number(0.0), number(-math.log(0.999))]


def rollout(scores: list[float], groups: list[int], sources: list[list[float]] | None = None) -> AdvantageInputs:
    given = torch.tensor(scores, dtype=torch.float64)
    mask, zeros = torch.ones(len(scores), 1, dtype=torch.bool), torch.zeros(len(scores), 1, dtype=torch.float64)
    streams = {}
    if sources is not None:
        columns = torch.tensor(sources, dtype=torch.float64).T
        streams = {"sources": columns, "source_weights": torch.ones(len(sources), dtype=torch.float64)}
    return AdvantageInputs(given, given[:, None], mask, torch.tensor(groups), zeros, zeros[:, 0], 1.0, 1.0, streams)


def advantages(name: str, inputs: AdvantageInputs) -> list[float]:
    estimator = PRESETS.get(name).advantages
    assert estimator is not None
    found = estimator(inputs)
    assert isinstance(found, Tensor)
    return found.tolist()


def test_max_rl_and_the_lesson() -> None:
    # μ = ¼: (1 − ¼) / ¼ = 3, and −1. Nothing solved, or all: 0.
    inputs = rollout([1.0, 0, 0, 0] + [0.0] * 4 + [1.0] * 4, [0] * 4 + [1] * 4 + [2] * 4)
    assert advantages("max_rl", inputs) == [3.0, -1.0, -1.0, -1.0] + [0.0] * 8
    # No mean to divide by.
    assert advantages("max_rl", rollout([1.0, -1.0, -3.0, 1.0], [0, 0, 1, 1])) == [0.0] * 4
    assert importlib.import_module("examples.lessons.04_own_algorithm").max_rl(inputs).tolist() == advantages(
        "max_rl", inputs
    )


def test_gdpo_compares_each_source_by_itself() -> None:
    # Deviations √(1/3) = .5773503 and √(200/3) = 8.1649658: ±.8660254 and −1.2247449, 1.2247449, 0, 0.
    sources = [[1.0, 0, 0, 1], [10.0, 30, 20, 20]]
    found = advantages("gdpo", rollout([11.0, 30, 20, 21], [0] * 4, sources))
    assert found == [number(-0.3587195), number(0.3587195), number(-0.8660254), number(0.8660254)]
    # A source that does not apply to the last two replies says nothing of them: ±.8660254, and ±.7071068 of two.
    sources[1][2:] = [math.nan, math.nan]
    found = advantages("gdpo", rollout([11.0, 30, 20, 21], [0] * 4, sources))
    assert found == [number(0.1589186), number(-0.1589186), number(-0.8660254), number(0.8660254)]


def test_rae_subtracts_the_moving_mean_of_a_seat() -> None:
    moving, seats = MovingMeans(), ["ask", "ask", "answer", "ask"]
    first = moving.take(torch.tensor([1.0, 0.0, -1.0, 2.0]), seats)
    assert first.tolist() == [0.0] * 4
    # Three scores of mean 1, 1 − .95³ = .142625; one of −1, −.05.
    assert moving.means == {"ask": number(0.142625), "answer": number(-0.05)}
    second = moving.take(torch.tensor([1.0, 3.0]), ["answer", "ask"])
    assert second.tolist() == [number(-0.05), number(0.142625)]
    assert moving.means == {"ask": number(0.28549375), "answer": number(0.0025)}
    # Of equal scores no order can show, so it is the recursion of the paper: .95 (.95 (0) + .05) + .05.
    alike = MovingMeans()
    alike.take(torch.ones(2), ["", ""])
    assert alike.means == {"": number(0.0975)}
    inputs = rollout([1.0, 3.0], [0, 1])
    inputs = replace(inputs, streams={"seat_means": second})
    assert advantages("rae", inputs) == [number(1.05), number(2.857375)]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_pass_the_checks(name: str) -> None:
    preset = PRESETS.get(name)
    assert preset.loss is not None
    check_loss(preset.loss, name, gradient=name in SMOOTH)
    reads = loss_reads(preset.loss, name)
    assert ("rollout_logprobs" in reads and "old_logprobs" not in reads) == preset.anchored
    assert Functions.of(PPOStageConfig(method=name)).scores_policy != preset.anchored  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_pass_the_checks(name: str) -> None:
    estimator = PRESETS.get(name).advantages
    assert estimator is not None
    check_advantages(estimator, name)
    reads = {"gdpo": {"sources", "source_weights"}, "rae": {"seat_means"}}
    assert advantage_reads(estimator, name) == reads.get(name, set())


def test_every_preset_is_a_method() -> None:
    assert set(get_args(Method)) == set(METHODS) >= set(PRESETS)


def test_the_docs_compare_every_preset() -> None:
    page = (ROOT / "docs" / "methods-table.md").read_text("utf-8")
    for name in PRESETS:
        preset = PRESETS.get(name)
        assert f"| `{name}` | {preset.paper} | {preset.differs} |" in page
    compared = page.partition("## On one task")[2]
    assert [name for name in METHODS if f"| `{name}` |" not in compared] == []


def test_a_users_dppo_in_the_docs_is_the_preset() -> None:
    """The function in docs/methods.md, run as it stands there."""
    page = (ROOT / "docs" / "methods.md").read_text("utf-8")
    [source] = re.findall(r"\n(def dppo\(.*?\n)\n\ngiven = ", page, flags=re.DOTALL)
    assert len(source.splitlines()) <= 15
    space: dict[str, Any] = {"torch": torch, "xray": xray}
    exec(source, space)
    mine, preset = space["dppo"], PRESETS.get("dppo_tv").loss
    assert preset is not None
    xray.check_loss(mine, gradient=False)
    draw = torch.Generator().manual_seed(0)
    logprobs, sampled = (-torch.rand(2, 200, generator=draw, dtype=torch.float64) * 2).unbind(0)
    worth, ones = torch.randn(200, generator=draw, dtype=torch.float64), torch.ones(200, dtype=torch.float64)
    tokens = PolicyLossInputs(logprobs, worth, ones, torch.arange(200), 0.15, 0.15, None, {"rollout_logprobs": sampled})
    theirs, ours = preset(tokens), mine(tokens)
    assert isinstance(theirs, TokenLoss)
    torch.testing.assert_close(ours.loss, theirs.loss)
    assert 20 < int(ours.clipped.sum()) < 180
    config = PPOStageConfig(method="dr_grpo", loss="mine:dppo", importance_correction="none", prompts_per_iteration=16)
    assert not Functions.of(config, loss=mine).scores_policy


def test_presets_are_read_without_torch() -> None:
    """As configs are."""
    code = "import sys; import xray_runtime.methods.ppo.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_preset_counts_in_the_keys_of_stages_that_use_it() -> None:
    module = "xray_runtime.methods.ppo.presets.sapo"
    assert PPOStageConfig(method="sapo").plugs() == PPOStageConfig(method="grpo", loss="sapo").plugs() == (module,)
    assert PPOStageConfig(method="grpo").plugs() == PPOStageConfig(method="icepop").plugs() == ()
