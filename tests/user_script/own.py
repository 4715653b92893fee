"""What a user may write: type checkers pass it, and find what `mistakes` does wrong."""

import json
from pathlib import Path

from prefect import flow

import xray


def correct(prompts: list[str], replies: list[str], answer: list[str]) -> list[float]:
    """1 for the right reply."""
    return [float(reply.strip() == right) for reply, right in zip(replies, answer, strict=True)]


@flow(task_runner=xray.task_runner())
def train(output: str = "runs/own", seed: int = 0) -> None:
    rows = [{"prompt": f"{n} + 1 =", "completion": str(n + 1), "answer": str(n + 1)} for n in range(500)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with xray.workspace(output, project="own", seed=seed, runtime={"device": "cpu"}):
        sums = xray.prepare(source="sums.jsonl", columns=["answer"], min_chars=1)
        base = xray.base(model="smollm2-135m")
        sft = xray.sft(base, data=sums, steps=30, engine={"precision": "bfloat16"})
        math = xray.reward(verifier={"kind": "math", "column": "answer"})
        policy = xray.ppo(
            sft,
            prompts=sums,
            rewards=[xray.reward(correct), 0.5 * math],
            method="grpo",
            samples_per_prompt=8,
            kl={"coef": 0.01},
            iterations=20,
        )
        result = xray.evaluate(policy, against=sft, prompts=sums, rewards=[correct])
        xray.register(policy, result)
        print(sft.result().path)


if __name__ == "__main__":
    train()
