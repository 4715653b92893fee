"""What the summary says of a stage that cannot have learnt."""

from __future__ import annotations

import pytest

from xray_runtime.report.findings import policy_findings

LEARNS = {
    "reward/std": [0.5, 0.4, 0.3],
    "rollout/tied_groups": [0.1, 0.3, 0.6],
    "policy/approx_kl": [0.01, 0.02, 0.01],
    "rollout/truncated": [0.2, 0.1, 0.0],
}


def findings(**changed: list[float]) -> list[str]:
    metrics = LEARNS | {name.replace("__", "/"): values for name, values in changed.items()}
    return policy_findings({name: list(enumerate(values)) for name, values in metrics.items()})


def test_nothing_is_said_of_one_that_learns() -> None:
    assert findings() == []
    assert policy_findings({}) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"reward__std": [0.0, 0.0, 0.0]}, "every reply had the same reward"),
        ({"rollout__tied_groups": [1.0, 1.0, 1.0]}, "no group taught anything"),
        ({"rollout__tied_groups": [0.9, 0.95, 1.0]}, "the same reward for 95% of the prompts"),
        ({"policy__approx_kl": [1e-5, 2e-5, 1e-6]}, "the policy hardly moved: 3e-05 nats a token"),
        ({"rollout__truncated": [1.0, 0.95, 0.9]}, "95% of the replies were cut off"),
    ],
)
def test_what_cannot_have_learnt_is_named(changed: dict[str, list[float]], said: str) -> None:
    [finding] = findings(**changed)
    assert said in finding
