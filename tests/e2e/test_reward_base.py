"""A lifecycle judged by a sequence-classification model in a directory, through the real command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Outcome, run_tiny, xray


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """A random Qwen3 with one label, whose tokenizer is not the policy's."""
    import torch
    import transformers

    from xray_runtime.data.tokenizing import train_tokenizer

    tokenizer = train_tokenizer(["hello there, how are you today", "fine thanks"] * 5, 300)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, intermediate_size=48, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    directory = tmp_path / "classifier"
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_lifecycle_is_judged_by_a_classifier(classifier: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    fields = ["reward=null", "preferences=null", f"reward_base.model={classifier}", 'ppo.stages=[{"iterations": 2, '
              '"prompts_per_iteration": 8, "minibatch_size": 4, "max_new_tokens": 8}]']  # fmt: skip
    outcome = run_tiny(output, *fields)
    assert outcome.code == 0, outcome.err
    stages = {stage["name"]: stage for stage in outcome.lifecycle["stages"]}
    assert list(stages) == ["prepare", "base", "sft", "reward_base", "ppo-1", "evaluate"]
    judge = Path(stages["reward_base"]["checkpoint"]["uri"])
    summary = json.loads((judge / "reward.json").read_text())
    assert summary["std"] != 1.0
    evaluation = Path(stages["evaluate"]["checkpoint"]["uri"])
    assert json.loads((evaluation / "evaluation.json").read_text())["reward_after"] is not None
    assert xray("audit", "--all", "--output", str(output)).code == 0
    # The key has the bytes of the classifier, not its path.
    moved = classifier.rename(tmp_path / "moved")
    explained = explain(output, [field.replace(str(classifier), str(moved)) for field in fields])
    assert explained.out.count(" cached ") == len(stages), explained.out
    refused = explain(output, fields)
    assert refused.code == 2
    assert refused.err.startswith("error: reward_base.model: ")


def explain(output: Path, fields: list[str]) -> Outcome:
    options = [part for field in fields for part in ("--set", field)]
    return xray("run", "configs/tiny.yaml", "--output", str(output), "--explain", *options)
