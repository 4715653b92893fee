"""A pretrained model learns to be kind from a function alone: SmolLM2-135M by GRPO, without pairs and reward model.

The reward knows three dozen words. What the replies are worth is judged by VADER, which knows thousands of them,
negation and emphasis, and is never trained on. Five minutes on two cores:

    xray run examples.smollm2_grpo:smollm2_grpo
"""

from __future__ import annotations

import re

from prefect import flow

import xray

KIND = re.compile(
    r"\b(amazing|awesome|beautiful|best|cool|enjoy|excited|favorite|fun|glad|good|great|happy|hope|interesting|"
    r"like|love|lovely|nice|perfect|thanks?|welcome|wonderful)\b",
    re.IGNORECASE,
)
UNKIND = re.compile(r"\b(afraid|bad|boring|hate|no|not|nothing|sad|sorry|\w+n't)\b", re.IGNORECASE)


def kind(prompts: list[str], replies: list[str]) -> list[float]:
    """1 where a reply says something kind and nothing that is not."""
    return [float(bool(KIND.search(reply)) and not UNKIND.search(reply)) for reply in replies]


@flow(task_runner=xray.task_runner(), persist_result=False)
def smollm2_grpo(output: str = "runs/smollm2-grpo", seed: int = 0, iterations: int = 12) -> None:
    """SFT on short human replies, GRPO, and an evaluation by a judge that was not trained against."""
    top = {"trainable_layers": 2, "engine": {"precision": "bfloat16", "micro_batch_tokens": 2048}}
    frozen = {"precision": "bfloat16"}
    with xray.workspace(output, project="smollm2-grpo", seed=seed, gold="vader"):
        chats = xray.prepare(context_messages=1, max_chars=80, max_prompt_tokens=80)
        base = xray.base(model="smollm2-135m")
        sft = xray.sft(base, data=chats, steps=30, batch_size=32, lr=3e-4, **top)
        policy = xray.ppo(
            sft,
            prompts=chats,
            rewards=[xray.reward(kind)],
            method="grpo",
            iterations=iterations,
            prompts_per_iteration=8,
            minibatch_size=32,
            lr=3e-4,
            reward_scaling="none",
            frozen=frozen,
            **top,
        )
        result = xray.evaluate(
            policy, against=sft, prompts=chats, rewards=[xray.reward(kind)], num_prompts=256, frozen=frozen
        )
        xray.register(policy, result)


if __name__ == "__main__":
    smollm2_grpo()
