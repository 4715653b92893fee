"""What a reward model that was trained here is given: the policy's tokens, or its own where the two differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xray_runtime.data.batch import TextBatch
from xray_runtime.data.pairs import Messages
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.rewards.reward_reader import RewardReader, answer_rows

PROMPT: list[Messages] = [[{"role": "user", "content": "how are you"}]]


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Any]:
    """The directory of a reward model that was trained here, and its tokenizer."""
    tokenizer = train_tokenizer(["how are you", "fine thanks"] * 5, 300)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "reward.json").write_text('{"mean": 0.0, "std": 1.0}')
    return tmp_path, tokenizer


def test_the_policys_own_tokens_are_read_as_they_were_sampled(trained: tuple[Path, Any]) -> None:
    directory, tokenizer = trained
    # A spelling that the tokenizer itself would not choose.
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "fine"]
    sampled = TextBatch.of([[7, 8]], [[*letters, tokenizer.eos_token_id]])
    assert RewardReader(directory, "ppo.rewards.0", tokenizer).rows(PROMPT, ["fine"], sampled) is sampled


@pytest.mark.parametrize("other", [train_tokenizer(["something else"] * 5, 290), None], ids=["other", "texts alone"])
def test_another_tokenizers_text_is_read_as_the_model_was_trained(trained: tuple[Path, Any], other: Any) -> None:
    directory, tokenizer = trained
    foreign = TextBatch.of([[99, 98]], [[97]])
    rows = RewardReader(directory, "ppo.rewards.0", other).rows(PROMPT, ["fine thanks"], foreign)
    [ids] = rows.input_ids
    text = tokenizer.decode(ids)
    assert text == "<|user|>how are you<|end|><|assistant|>fine thanks<|end|>"


def test_another_template_is_another_tokenizer(trained: tuple[Path, Any]) -> None:
    directory, _ = trained
    policy = train_tokenizer(["how are you", "fine thanks"] * 5, 300)
    policy.chat_template = policy.chat_template.replace("<|end|>", "\n")
    foreign = TextBatch.of([[99, 98]], [[97]])
    rows = RewardReader(directory, "ppo.rewards.0", policy).rows(PROMPT, ["fine"], foreign)
    assert rows.input_ids.lengths[0] > 3


def test_a_reward_model_reads_answers_without_reasoning(trained: tuple[Path, Any]) -> None:
    directory, tokenizer = trained
    thought = "<think>\nhow\n</think>\n\nfine"
    rows = RewardReader(directory, "ppo.rewards.0").rows(PROMPT, [thought])
    [ids] = rows.input_ids
    assert tokenizer.decode(ids) == "<|user|>how are you<|end|><|assistant|>fine<|end|>"
    # In the policy's tokens: only rows with reasoning are written again.
    sampled = TextBatch.of([[7, 8], [7, 9]], [[5, tokenizer.eos_token_id], [6]])
    plain, short = answer_rows(tokenizer, PROMPT * 2, ["fine", thought], sampled).input_ids
    assert plain.tolist() == [7, 8, 5, tokenizer.eos_token_id]
    assert tokenizer.decode(short[2:]) == "fine<|end|>"
    assert short[:2].tolist() == [7, 9]
    assert answer_rows(tokenizer, PROMPT, ["fine"], sampled) is sampled
