"""SFT on rows with reasoning, then GRPO with a reward that reads the reasoning apart from the answer.

    xray run tests.e2e.thinking:thinking --set template=qwen3

People choose one of two thoughts and one of two answers at random, and one of each is right. The task is small, so that
the run shows whether rewards find the reasoning, and the answer behind it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from prefect import flow

import xray
from tests.unit.data.thinking_templates import tokenizer_for
from xray_runtime.models.causal_lm import fresh_llama, save_model
from xray_runtime.models.config import FreshBase


def write_rows(path: Path, count: int = 1500) -> None:
    """Conversations in OpenAI's form, with the right answer beside them."""
    draw, lines = random.Random(0), []
    for number in draw.choices(range(1000), k=count):
        thought, answer = draw.choice(["add them", "guess it"]), draw.choice("yn")
        reply = {"role": "assistant", "content": answer, "reasoning_content": thought}
        messages = [{"role": "user", "content": " ".join(f"{number:03}")}, reply]
        lines.append(json.dumps({"messages": messages, "answer": "y"}) + "\n")
    path.write_text("".join(lines))


def thinks_right(
    prompts: list[str], replies: list[str], *, reasoning: list[str | None], answers: list[str]
) -> list[float]:
    """1 where the reasoning is the right one and the answer is a letter alone; whole replies hold both."""
    rows = zip(reasoning, answers, strict=True)
    return [float(thought == "add them" and len(said.strip()) == 1) for thought, said in rows]


@flow(task_runner=xray.task_runner(), persist_result=False)
def thinking(output: str = "runs/thinking", template: str = "qwen3", iterations: int = 8, seed: int = 0) -> None:
    """A policy that thinks and answers rightly more often than the people it learned from."""
    directory = Path(output).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    write_rows(directory / "rows.jsonl")
    sizes: dict[str, Any] = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4}
    tokenizer = tokenizer_for(template)
    save_model(fresh_llama(FreshBase(**sizes), tokenizer, seed), tokenizer, directory / "model")
    rewards = [
        thinks_right,
        xray.reward(verifier={"kind": "regex", "pattern": r"^\s*([yn])\s*$", "column": "answer"}),
    ]
    lengths: dict[str, Any] = {"max_new_tokens": 40}
    with xray.workspace(output, project="thinking", seed=seed):
        data = xray.prepare(source=str(directory / "rows.jsonl"), columns=["answer"], min_chars=1)
        base = xray.base(model=str(directory / "model"))
        sft = xray.sft(base, data=data, steps=150, max_response_tokens=48)
        policy = xray.ppo(
            sft,
            prompts=data,
            rewards=rewards,
            method="grpo",
            iterations=iterations,
            lr=1e-3,
            reward_scaling="none",
            prompts_per_iteration=32,
            minibatch_size=64,
            **lengths,
        )
        result = xray.evaluate(policy, against=sft, prompts=data, rewards=rewards, num_prompts=128, **lengths)
        xray.register(policy, result)
