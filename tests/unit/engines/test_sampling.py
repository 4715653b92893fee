"""What is left to sample from, against probabilities worked out by hand; where a reply ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xray_runtime.engines.generation import up_to_stop
from xray_runtime.engines.generators.transformers.sampler import SeededSampling
from xray_runtime.engines.sampling import Reply, Sampling
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.methods.evaluate.config import EvaluationConfig
from xray_runtime.methods.loading import validate

PROBABILITIES = [0.5, 0.3, 0.15, 0.05]
DRAWS = 200


def drawn(prompt: list[int] | None = None, **options: Any) -> dict[int, float]:
    """Token → its probability, of those that DRAWS seeds draw."""
    sampling = Sampling(4, options.pop("temperature", 1.0), (9,), 9, **options)
    drawing = SeededSampling([prompt or []] * DRAWS, list(range(DRAWS)), sampling, torch.device("cpu"))
    scores = torch.tensor(PROBABILITIES).log().expand(DRAWS, -1)
    chosen = drawing(torch.zeros(DRAWS, 0, dtype=torch.long), scores).argmax(-1)
    return dict(zip(chosen.tolist(), drawing.logprobs[0].exp().tolist(), strict=True))


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}),
        ({"top_k": 2}, {0: 0.625, 1: 0.375}),
        ({"top_p": 0.9}, {0: 0.5 / 0.95, 1: 0.3 / 0.95, 2: 0.15 / 0.95}),
        ({"min_p": 0.5}, {0: 0.625, 1: 0.375}),
        # After top_k, 0.625 of the probability is token 0's.
        ({"top_k": 2, "top_p": 0.6}, {0: 1.0}),
        # Temperature first: squares are 0.25, 0.09, 0.0225 and 0.0025, of 0.365; 0.0225 < 0.1 × 0.25.
        ({"temperature": 0.5, "min_p": 0.1}, {0: 0.25 / 0.34, 1: 0.09 / 0.34}),
    ],
)
def test_filtered_tokens_keep_their_proportions(options: dict[str, Any], left: dict[int, float]) -> None:
    assert drawn(**options) == pytest.approx(left, abs=1e-6)


def test_a_repeated_token_is_penalized() -> None:
    # log 0.5 is negative: times 2 it is log 0.25. Of 0.75 in all.
    weights = [0.25, 0.3, 0.15, 0.05]
    assert drawn(prompt=[0], repetition_penalty=2.0) == pytest.approx(
        {token: weight / 0.75 for token, weight in enumerate(weights)}, abs=1e-6
    )


class Letters:
    """Token n is the n-th letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


def test_a_text_ends_a_reply_with_the_token_that_completes_it() -> None:
    reply = Reply([0, 1, 2, 3], [-0.1, -0.2, -0.3, -0.4])
    assert up_to_stop(reply, ("bc", "d"), Letters()) == Reply([0, 1, 2], [-0.1, -0.2, -0.3])
    assert up_to_stop(reply, ("a",), Letters()) == Reply([0], [-0.1])
    assert up_to_stop(reply, ("ac",), Letters()) is None


def test_options_reach_the_sampler() -> None:
    config = EvaluationConfig(top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, stop=["\n\n"], temperature=0.7)
    assert Sampling.of(config, (1,), 0) == Sampling(16, 0.7, (1,), 0, ("\n\n",), 0.9, 5, 0.1, 1.2)


def test_a_penalty_that_biases_ratios_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"repetition_penalty = 0\.5 is not allowed: the policy's"):
        validate({"ppo": {"stages": [{"repetition_penalty": 0.5}]}})
