"""PPO's loop with replies that have reasoning: what reward models, functions, metrics and the ledger see of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.data.encoding import encode_replies
from tests.unit.methods.ppo.loop import REPLIES, PPOModel, World, attempt, logprob
from xray_runtime.data.batch import ReplyBatch
from xray_runtime.data.ledger import read_shard, readable, shard_path
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import decode_prompts, train_tokenizer
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.rewards.config import reward_term

WHOLE = ["<think>\nis it 7\n</think>\n\nan answer", "an answer", "<think>\nis it 8", "<think>\n7\n</think>\n\n7"]
REASONING, ANSWERS = ["is it 7", None, "is it 8", "7"], ["an answer", "an answer", "", "7"]
TOKENIZER = train_tokenizer([*(f"question number {number}" for number in range(10)), "an answer"] * 5, 300)
READ: list[Any] = []
"""Rows that the reward model scored."""


class Thinking(PPOModel):
    """A policy that replies `WHOLE`, the third one cut off."""

    def _generate(self, rows: Any, sampling: Any, version: int) -> Any:
        if len(rows.seed) != REPLIES:
            return super()._generate(rows, sampling, version)
        ids = encode_replies(TOKENIZER, WHOLE)
        ids[2] = ids[2][:-1]
        tokens = Ragged.of(ids)
        ended = np.array([True, True, False, True])
        return ReplyBatch(
            response_ids=tokens,
            rollout_logprobs=Ragged(logprob(tokens.values), tokens.offsets),
            ended=ended,
        )

    def _score(self, rows: Any) -> Any:
        if self.role == "rewards.0":
            READ.append(rows)
        return super()._score(rows)


def test_each_reads_its_part(inputs: PPOInputs, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def function(prompts: list[str], replies: list[str], *, reasoning: Any, answers: Any) -> list[float]:
        seen.update(replies=replies, reasoning=reasoning, answers=answers)
        return [1.0, 0.0, 0.5, 2.0]

    READ.clear()
    rewards = [reward_term(model="rewards.0"), reward_term(function="f")]
    given: dict[str, Any] = {"iterations": 1, "max_new_tokens": 64, "rewards": rewards, "model": Thinking}
    recorder = attempt(inputs, tmp_path / "out", World(), functions={"f": function}, **given)
    assert seen == {"replies": WHOLE, "reasoning": REASONING, "answers": ANSWERS}
    [rows] = READ
    read = [ids[n:].tolist() for ids, n in zip(rows.input_ids, rows.prompt_lengths, strict=True)]
    assert decode_prompts(TOKENIZER, read) == ANSWERS
    assert [ids[-1] for ids in read] == [TOKENIZER.eos_token_id] * 4
    # "<think>" is spelled by letters here: the reasoning of a reply ends with its last ">".
    spelled = ("<think>\nis it 7\n</think>", WHOLE[2], "<think>\n7\n</think>")
    sizes = [len(TOKENIZER(text)["input_ids"]) for text in spelled]
    [point] = [point for point in recorder.points if "rollout/length" in point]
    assert point["rollout/reasoning_length"] == sum(sizes) / 4
    assert point["rollout/answer_length"] == point["rollout/length"] - sum(sizes) / 4
    shown = list(readable(read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table, TOKENIZER))
    assert [row["reply"] for row in shown] == ANSWERS
    assert [row.get("reasoning") for row in shown] == REASONING
