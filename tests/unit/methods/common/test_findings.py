"""What the summary says of a stage that cannot have learnt."""

from __future__ import annotations

import pytest

from xray_runtime.methods.common.findings import (
    evaluation_findings,
    monitored,
    policy_findings,
    preferences_findings,
    sft_findings,
)

LEARNS = {
    "reward/std": [0.5, 0.4, 0.3],
    "rollout/tied_groups": [0.1, 0.3, 0.6],
    "policy/approx_kl": [0.01, 0.02, 0.01],
    "rollout/truncated": [0.2, 0.1, 0.0],
}


def findings(**changed: list[float]) -> list[str]:
    metrics = LEARNS | {name.replace("__", "/"): values for name, values in changed.items()}
    return policy_findings({name: list(enumerate(values)) for name, values in metrics.items()})


def test_a_learning_policy_raises_no_alert() -> None:
    assert findings() == []
    assert policy_findings({}) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"reward__std": [0.0, 0.0, 0.0]}, "every reply had the same reward"),
        ({"rollout__tied_groups": [1.0, 1.0, 1.0]}, "no advantage was other than 0"),
        ({"rollout__tied_groups": [0.9, 0.95, 1.0]}, "the same reward for 95% of the prompts"),
        ({"policy__approx_kl": [1e-5, 2e-5, 1e-6]}, "the policy hardly changed: 3e-05 nats per token"),
        ({"rollout__truncated": [1.0, 0.95, 0.9]}, "95% of the replies were cut off"),
    ],
)
def test_runs_that_cannot_learn_are_named(changed: dict[str, list[float]], said: str) -> None:
    [finding] = findings(**changed)
    assert said in finding


PLEASED = {
    "reward/source/rewards.0/mean": [0.2] * 5 + [1.0] * 5 + [1.76] * 5,
    "reward/source/rewards.0/std": [1.0] * 15,
    "reward/gold": [0.18] * 10 + [0.20] * 5,
    "reward/gold_std": [0.5] * 15,
}


def test_reward_hacking_is_detected_from_start_and_end() -> None:
    series = {name: list(enumerate(values)) for name, values in (LEARNS | PLEASED).items()}
    assert policy_findings(series) == []
    series["hacking/judge/rewards.0/gold"] = [(12, 1.0), (13, 1.0), (14, 1.0)]
    [finding] = policy_findings(series)
    assert "rewards.0 rose from +0.20 to +1.76 while the gold score went from +0.18 to +0.20" in finding
    assert finding.endswith("(seen from iteration 13 on)")
    # Of a record that lacks what it was told from, that it was there.
    [finding] = policy_findings({"hacking/length": [(3, 1.0)]})
    assert finding == "a sign of a hacked reward: length (seen from iteration 4 on)"


SMOLLM = {"reward_before": 0.20, "reward_after": 1.76, "gold_before": 0.18, "gold_after": 0.20, "win_rate": 0.49}
"""What `configs/smollm2.yaml` once ended with."""


def said(**changed: float) -> list[str]:
    return evaluation_findings({f"evaluate/{name}": [(0, value)] for name, value in (SMOLLM | changed).items()})


def test_an_evaluation_says_that_the_policy_pleased_its_reward_alone() -> None:
    [finding] = said()
    assert "rose from +0.20 to +1.76 while the gold score went from +0.18 to +0.20 (win rate 0.49)" in finding
    assert "learned to please the reward" in finding
    judged = {name: value for name, value in SMOLLM.items() if not name.startswith("gold")}
    [finding] = evaluation_findings({f"evaluate/{name}": [(0, value)] for name, value in judged.items()})
    assert "to +1.76 while its judge did not find it better (win rate 0.49)" in finding


@pytest.mark.parametrize("changed", [{"win_rate": 0.62}, {"reward_after": 0.9}, {"reward_after": float("nan")}])
def test_an_evaluation_that_was_won_or_rose_little_says_nothing(changed: dict[str, float]) -> None:
    assert said(**changed) == []
    assert evaluation_findings({}) == []


def test_alerts_give_their_numbers() -> None:
    series = {
        "rollout/distinct_in_reply": [(0, 1.0), (1, 0.8), (2, 0.4), (3, 0.2)],
        "reward/source/fluency/mean": [(0, -1.0), (1, 0.0), (2, 2.0), (3, 3.0)],
        "policy/lr": [(0, 0.1)],
    }
    # Means of the first two and of the last two iterations.
    numbers = [("reward/source/fluency/mean", "-0.5 → 2.5"), ("rollout/distinct_in_reply", "0.9 → 0.3")]
    assert monitored(series) == [("signs of a hacked reward", "none"), *numbers]
    signs = {"hacking/length": [(2, 1.0), (3, 1.0)]}
    assert monitored(series | signs)[0] == ("signs of a hacked reward", "length in 2 iterations")
    # Nobody looked.
    assert monitored({"reward/mean": [(0, 1.0)]}) == []


def test_too_long_rows_are_reported() -> None:
    def series(group: str, **counts: float) -> dict[str, list[tuple[int, float]]]:
        return {f"{group}/{name}": [(0, value)] for name, value in counts.items()}

    limits = {"max_prompt_tokens": 1024.0, "max_response_tokens": 512.0}
    counts = {"pairs": 9700.0, "dropped_prompt_too_long": 240.0, "dropped_reply_too_long": 60.0}
    assert sft_findings(series("sft", **limits, **counts)) == [
        "dropped 300 of 10,000 replies: 240 to prompts of more than 1,024 tokens (data.max_prompt_tokens), 60 of "
        "more than 512 tokens (sft.max_response_tokens); listed in dropped.jsonl of the checkpoint"
    ]
    only = series("sft", **limits, pairs=9.0, dropped_prompt_too_long=0.0, dropped_reply_too_long=1.0)
    assert sft_findings(only) == [
        "dropped 1 of 10 replies: 1 of more than 512 tokens (sft.max_response_tokens); listed in dropped.jsonl of the "
        "checkpoint"
    ]
    assert not sft_findings(
        series("sft", pairs=10.0, **limits, dropped_prompt_too_long=0.0, dropped_reply_too_long=0.0)
    )
    asked = series("prompts", too_long=3.0, different=40.0, max_tokens=342.0)
    for findings_of in (policy_findings, evaluation_findings):
        assert findings_of(asked) == [
            "left out 3 rows with prompts of more than 342 tokens (data.max_prompt_tokens); 40 distinct prompts remain"
        ]
    assert preferences_findings(series("preferences", pairs=8.0, dropped_same_or_empty=2.0)) == [
        "dropped 2 of 10 pairs: 2 with two equal or empty replies"
    ]
