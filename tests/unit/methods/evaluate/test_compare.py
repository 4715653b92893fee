"""The stage `compare` without its engines: who is asked what, and what the answers come to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from xray_runtime.cluster.stage import Stage
from xray_runtime.data.pairs import Example, PreferenceExample, prompt_text, write_pairs
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import Artifact, Dataset, Model
from xray_runtime.methods.compare.body import champion_prompts, select_prompts
from xray_runtime.methods.compare.kind import CompareInputs
from xray_runtime.methods.evaluate.config import EvaluationConfig
from xray_runtime.methods.evaluate.judging import Panel, judge
from xray_runtime.rewards.config import reward_term
from xray_runtime.rewards.verifier_config import RegexVerifier

CONFIG = EvaluationConfig(num_prompts=8, bootstrap_samples=100)
BRIEF = reward_term(verifier=RegexVerifier(pattern="^.{0,9}$"))


def test_each_judge_decides_by_itself_and_rewards_decide_nothing() -> None:
    rewards = {"candidate": torch.tensor([2.0, 2.0]), "champion": torch.tensor([1.0, 1.0])}
    golds = {"candidate": torch.tensor([0.0, 0.5]), "champion": torch.tensor([1.0, 0.5])}
    other = {"candidate": torch.tensor([3.0, 3.0]), "champion": torch.tensor([1.0, 2.0])}
    shown = {"candidate": torch.tensor([0.0, 0.0]), "champion": torch.tensor([9.0, 9.0])}
    config = CONFIG.model_copy(update={"gold": "vader", "judges": [BRIEF, BRIEF.model_copy(update={"weight": 0.0})]})
    assert config.judging == ["gold", "regex"]
    panel = Panel({"gold": golds, "regex": other, "regex-2": shown}, rewards)
    content = judge(config, 0, "compare", "candidate", "champion", panel)
    assert content["judge"] == "gold"  # the strictest of those that judge
    assert content["win_rate"] == 0.25  # one lost, one tied: (0 + ½) / 2
    assert {name: (found["win_rate"], found["judges"]) for name, found in content["judges"].items()} == {
        "gold": (0.25, True),
        "regex": (1.0, True),
        "regex-2": (0.0, False),
    }
    assert (content["judges"]["regex"]["delta"], content["judges"]["regex"]["score_champion"]) == (1.5, 1.5)
    assert content["gold_delta"] == -0.5  # (−1 + 0) / 2
    assert content["reward_delta"] == 1.0
    assert content["reward_delta_ci95"] == [1.0, 1.0]  # every difference is 1, whatever is drawn
    assert (content["gold_champion"], content["gold_candidate"]) == (0.75, 0.25)
    # What it was trained against says nothing of who wins.
    alone = judge(CONFIG, 0, "compare", "candidate", "champion", Panel({}, rewards))
    assert (alone["judge"], alone["win_rate"], alone["judges"], alone["reward_delta"]) == (None, None, {}, 1.0)
    assert {alone[f"gold_{what}"] for what in ("delta", "delta_ci95", "champion", "candidate")} == {None}


def said(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"question {number}"}]


@pytest.fixture
def stage(tmp_path: Path) -> Stage[EvaluationConfig, CompareInputs]:
    """Twelve held-out prompts, of which the champion was trained on numbers 0, 1 and, as a preference, 2."""
    datasets: dict[str, dict[str, list[Any]]] = {
        "prompts": {"heldout": [Example(str(i), "c", said(i), "a") for i in range(12)]},
        "seen-data": {"train": [Example(str(i), "c", said(i), "a") for i in (0, 1, 50)]},
        "seen-preferences": {"train": [PreferenceExample("2", said(2), "a", "b")]},
    }
    for role, files in datasets.items():
        (tmp_path / role).mkdir()
        for name, rows in files.items():
            write_pairs(tmp_path / role / f"{name}.arrow", type(rows[0]), rows)
    limit_prompts(tmp_path / "prompts", 32)
    inputs = CompareInputs(
        policy=Model(tmp_path / "candidate"),
        champion=Model(tmp_path / "champion"),
        prompts=Dataset(tmp_path / "prompts"),
        seen=[Artifact(tmp_path / "seen-data"), Artifact(tmp_path / "seen-preferences")],
    )
    return Stage("compare", 3, CONFIG, inputs, RuntimeConfig(), no_models)


def limit_prompts(dataset: Path, max_prompt_tokens: int) -> None:
    (dataset / "dataset.json").write_text(json.dumps({"max_prompt_tokens": max_prompt_tokens}))


def no_models(specs: Mapping[str, Any]) -> Any:
    raise AssertionError("asking opens no models")


def test_people_judge_no_prompts_the_champion_was_trained_on(stage: Stage[EvaluationConfig, CompareInputs]) -> None:
    # A vocabulary of its own each: the same text is other tokens.
    tokenizers = {
        "candidate": train_tokenizer(["question"] * 9, 300),
        "champion": train_tokenizer(["answers"] * 9, 300),
    }
    seen = champion_prompts(stage.inputs)
    asked = [prompt_text(messages) for messages in select_prompts(stage, tokenizers, seen)[0]]
    assert len(asked) == 8
    assert set(asked) <= {f"question {i}" for i in range(3, 12)}
    assert asked == [prompt_text(messages) for messages in select_prompts(stage, tokenizers, seen)[0]]


def test_too_few_prompts_are_an_error(stage: Stage[EvaluationConfig, CompareInputs]) -> None:
    tokenizer = train_tokenizer(["question"] * 9, 300)
    limit_prompts(stage.inputs.prompts.path, 4)
    with pytest.raises(ValueError, match="0 held-out prompts remain on which the champion was not trained, but 8 are"):
        select_prompts(stage, {"candidate": tokenizer, "champion": tokenizer}, champion_prompts(stage.inputs))
