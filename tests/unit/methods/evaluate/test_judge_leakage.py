"""Who may judge a policy, as a graph shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import xray
from tests.unit.methods.stages import ran
from xray_runtime.data.pairs import Pairs, PreferenceExample, prompt_text, write_pairs
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Preferences
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.kernel.graph.handles import Handle
from xray_runtime.methods.preferences.config import SplitPreferencesConfig
from xray_runtime.methods.split_preferences import body as split_preferences
from xray_runtime.methods.split_preferences.kind import SplitPreferencesInputs

MATHS: dict[str, Any] = {"verifier": {"kind": "regex", "pattern": "42"}}
ORACLE = {"judge": {"url": "http://host/v1", "model": "m", "rubric": "Is it kind?"}}
ASIDE = "list it under rewards, which are reported but decide no wins"


def long(prompts: list[str], replies: list[str]) -> list[float]:
    return [float(len(reply)) for reply in replies]


def graph() -> dict[str, Handle]:
    data = xray.prepare(name="chats")
    sft = xray.sft(xray.base(model="m"), data)
    pairs = xray.preferences(data=data, source="dataset", path="pairs.jsonl", name="pairs")
    parts = {part: xray.split_preferences(pairs, part=part, name=part) for part in ("training", "heldout")}
    trained = xray.reward_model(sft, parts["training"], name="trained")
    sources = [trained, 0.0 * xray.reward(**ORACLE), xray.reward(long), xray.reward(**MATHS)]
    policy = xray.ppo(sft, data, rewards=sources, name="policy")
    return {"data": data, "sft": sft, "pairs": pairs, **parts, "trained": trained, "policy": policy}


def evaluated(judges: Callable[[dict[str, Handle]], list[Any]], policy: str = "policy", **fields: Any) -> Handle:
    with recording():
        made = graph()
        return xray.evaluate(made[policy], made["sft"], made["data"], judges=judges(made), **fields)


def refused(judges: Callable[[dict[str, Handle]], list[Any]], **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        evaluated(judges, **fields)
    return str(caught.value)


def other_rm(made: dict[str, Handle], pairs: str) -> Handle:
    return xray.reward_model(made["sft"], made[pairs], name="other")


def test_a_reward_model_of_the_other_part_of_the_pairs_judges() -> None:
    call = evaluated(lambda made: [other_rm(made, "heldout"), xray.reward(**ORACLE)], gold="vader").call
    assert call is not None
    assert call.parents["judges.0"].name == "other"
    assert call.config.judging == ["gold", "judges.0", "judge"]
    assert set(call.kind.models(call.config)) == {"generator", "before", "after", "judges.0"}


@pytest.mark.parametrize(
    ("judges", "reason"),
    [
        (lambda made: [made["trained"]], "judges.0: 'judges.0' is not allowed: policy was trained against it"),
        (
            lambda made: [other_rm(made, "training")],
            "judges.0: 'judges.0' is not allowed: trained was trained on the same pairs, training",
        ),
        (
            # All pairs are also those of a part.
            lambda made: [other_rm(made, "pairs")],
            "judges.0: 'judges.0' is not allowed: trained was trained on the same pairs, training",
        ),
        (
            lambda made: [
                xray.reward_model(
                    made["sft"],
                    xray.preferences(
                        policy=made["sft"], data=made["data"], source="rewards", rewards=[made["trained"]], samples=2
                    ),
                )
            ],
            "judges.0: 'judges.0' is not allowed: policy was trained against trained, which it comes from",
        ),
        (
            lambda made: [xray.reward(**ORACLE), long],
            "judges.1: 'test_judge_leakage:long' is not allowed: policy was trained against it",
        ),
        (
            lambda made: [xray.reward(verifier=MATHS["verifier"] | {"limit_s": 9.0})],
            "judges.0: 'regex' is not allowed: policy was trained against it",
        ),
        (
            lambda made: [xray.reward([other_rm(made, "heldout"), made["trained"]])],
            "judges.0: 'judges.0+judges.1' is not allowed: policy was trained against it",
        ),
    ],
)
def test_who_is_not_independent_is_refused(judges: Callable[[dict[str, Handle]], list[Any]], reason: str) -> None:
    assert refused(judges) == f"evaluate: {reason}; {ASIDE}"
    # Beside the judges anything is shown, and before PPO nothing of it was trained against.
    evaluated(lambda made: [0.0 * source for source in map(weighable, judges(made))])
    evaluated(judges, policy="sft")


def weighable(source: Any) -> Any:
    return xray.reward(source) if callable(source) and not isinstance(source, Handle) else source


def test_a_gold_score_that_is_a_reward_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", __name__)
    said = refused(lambda made: [], gold=f"{__name__}:long")
    reason = "is not allowed: policy was trained against it; use another judge"
    assert said == f"evaluate: gold: '{__name__}:long' {reason}"


def test_pairs_of_a_dpo_policy_do_not_judge_it() -> None:
    with recording():
        made = graph()
        tuned = xray.dpo(made["sft"], made["training"])
        xray.evaluate(tuned, made["sft"], made["data"], judges=[other_rm(made, "heldout")], name="fine")
        with pytest.raises(ConfigError, match="dpo was trained on the same pairs, training"):
            xray.evaluate(tuned, made["sft"], made["data"], judges=[made["trained"]])


def test_the_parts_share_no_prompt_and_are_the_whole(tmp_path: Path) -> None:
    def said(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"question {number // 2}"}]  # two pairs of each prompt

    source = tmp_path / "pairs"
    source.mkdir()
    for side, numbers in (("train", range(200)), ("heldout", range(200, 240))):
        rows = [PreferenceExample(str(i), said(i), "good", "bad") for i in numbers]
        write_pairs(source / f"{side}.arrow", PreferenceExample, rows)

    def part(name: str) -> dict[str, list[PreferenceExample]]:
        config = SplitPreferencesConfig(part=name, heldout=0.25)  # type: ignore[arg-type]
        out, _ = ran(split_preferences.run, tmp_path, config, SplitPreferencesInputs(Preferences(source)), seed=3)
        return {side: list(Pairs(out / f"{side}.arrow", PreferenceExample)) for side in ("train", "heldout")}

    parts = {name: part(name) for name in ("training", "heldout")}
    for side, count in (("train", 200), ("heldout", 40)):
        asked = {name: {prompt_text(p.prompt) for p in found[side]} for name, found in parts.items()}
        assert not asked["training"] & asked["heldout"]
        assert sum(len(found[side]) for found in parts.values()) == count
    # A quarter of 100 prompts; 4 deviations of the draw, √(100 · ¼ · ¾) ≈ 4.3.
    assert abs(len(parts["heldout"]["train"]) / 2 - 25) < 18
