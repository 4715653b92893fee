"""A flow whose agent asks about pictures: it sends the messages of its task, and then the picture again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
from prefect import flow

import xray
from examples.squares_vlm import write_model, write_pictures


def play(task: dict[str, Any]) -> float:
    """1 for a right answer, half of it for a second one, to a question with the picture once more."""
    client, messages = openai.OpenAI(), list(task["messages"])
    assert messages[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    for reward in (1.0, 0.5):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        if answer == task["answer"]:
            return reward
        again = {"role": "user", "content": [*messages[0]["content"][:1], {"type": "text", "text": "Look again."}]}
        messages += [{"role": "assistant", "content": answer}, again]
    return 0.0


@flow(task_runner=xray.task_runner(), persist_result=False)
def picture_agent(output: str = "runs/picture-agent", family: str = "qwen2_5_vl") -> None:
    """GRPO of an untrained model by the agent, and the best of its episodes."""
    pictures, model = Path(output).absolute() / "pictures", Path(output).absolute() / "model"
    rows = write_pictures(pictures, count=120, right=1.0)
    write_model(model, family)
    sampled: dict[str, Any] = {"max_new_tokens": 4, "generator": {"engine": "transformers"}}
    asked: dict[str, Any] = {"environment": {"agent": play, "max_tokens": 64}}
    with xray.workspace(output, project="agent", seed=0):
        data = xray.prepare(source=str(rows), pictures=str(pictures), columns=["answer"], heldout_fraction=0.2)
        base = xray.base(model=str(model))
        options: dict[str, Any] = {"method": "grpo", "iterations": 2, "lr": 5e-4, "reward_scaling": "none"}
        sizes = {"prompts_per_iteration": 4, "samples_per_prompt": 2, "minibatch_size": 8}
        xray.ppo(base, prompts=data, name="ppo", **asked, **options, **sizes, **sampled)
        xray.best_of_n(base, prompts=data, name="best", samples=2, num_prompts=8, **asked, **sampled)
