"""The stage `compare` without its engines: who is asked what, and what the answers come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from xray_runtime.stages.spec import SEEN_BY_CHAMPION, StageSpec

from xray_runtime.config.evaluate import EvaluateConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.data.pairs import Example, PreferenceExample, prompt_text, write_jsonl
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.stages.compare import asked_prompts, compare
from xray_runtime.store.ref import CheckpointRef

CONFIG = EvaluateConfig(num_prompts=8, bootstrap_samples=100)


def test_gold_judges_where_there_is_one() -> None:
    rewards = {"candidate": torch.tensor([2.0, 2.0]), "champion": torch.tensor([1.0, 1.0])}
    golds = {"candidate": torch.tensor([0.0, 0.5]), "champion": torch.tensor([1.0, 0.5])}
    lengths = {"candidate": [4, 6], "champion": [1, 2]}
    content = compare(CONFIG, 0, rewards, golds, lengths)
    assert content["judge"] == "gold"
    assert content["win_rate"] == 0.25  # one lost, one tied: (0 + ½) / 2
    assert content["gold_delta"] == -0.5  # (−1 + 0) / 2
    assert content["reward_delta"] == 1.0
    assert content["reward_delta_ci95"] == [1.0, 1.0]  # every difference is 1, whatever is drawn
    assert (content["length_candidate"], content["length_champion"]) == (5.0, 1.5)
    alone = compare(CONFIG, 0, rewards, None, lengths)
    assert (alone["judge"], alone["win_rate"]) == ("reward", 1.0)
    assert "gold_delta" not in alone


def said(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"question {number}"}]


@pytest.fixture
def spec(tmp_path: Path) -> StageSpec:
    """Twelve held-out prompts, of which the champion was trained on numbers 0, 1 and, as a preference, 2."""
    datasets: dict[str, Any] = {
        "dataset": {"heldout": [Example(str(i), "c", said(i), "a") for i in range(12)]},
        f"{SEEN_BY_CHAMPION}1": {"train": [Example(str(i), "c", said(i), "a") for i in (0, 1, 50)]},
        f"{SEEN_BY_CHAMPION}2": {"train": [PreferenceExample("2", said(2), "a", "b")]},
    }
    parents = {}
    for role, files in datasets.items():
        (tmp_path / role).mkdir()
        for name, rows in files.items():
            write_jsonl(tmp_path / role / f"{name}.jsonl", rows)
        ref = CheckpointRef(uri=str(tmp_path / role), sha256="0" * 64, stage=role, kind="prepare", step=0)
        parents[role] = ref
    sections = {"lengths": {"max_prompt_tokens": 32}}
    return StageSpec(
        name="compare",
        kind="compare",
        key="0" * 64,
        seed=3,
        sections=sections,
        parents=parents,
        runtime=RuntimeConfig(),
    )


def test_nobody_is_asked_what_the_champion_has_seen(spec: StageSpec) -> None:
    # A vocabulary of its own each: the same text is other tokens.
    tokenizers = {
        "candidate": train_tokenizer(["question"] * 9, 300),
        "champion": train_tokenizer(["answers"] * 9, 300),
    }
    asked = [prompt_text(messages) for messages in asked_prompts(spec, CONFIG, tokenizers)]
    assert len(asked) == 8
    assert set(asked) <= {f"question {i}" for i in range(3, 12)}
    assert asked == [prompt_text(messages) for messages in asked_prompts(spec, CONFIG, tokenizers)]


def test_too_few_prompts_are_an_error(spec: StageSpec) -> None:
    tokenizer = train_tokenizer(["question"] * 9, 300)
    short = spec.model_copy(update={"sections": {"lengths": {"max_prompt_tokens": 4}}})
    with pytest.raises(ValueError, match="0 held-out prompts are left that the champion was not trained on; 8 are"):
        asked_prompts(short, CONFIG, {"candidate": tokenizer, "champion": tokenizer})
