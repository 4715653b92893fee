"""Does every way to align a model learn? Accuracy on held-out problems before and after, by method.

    python -m benchmarks.learning [--seeds 3] [--methods grpo dpo …]

The task is that of lesson 5 of `examples/`: the largest of four digits, from demonstrations that are right half of the
time. Of each seed all methods start from the same SFT model. `shuffled` is a control: GRPO with rewards that belong to
other replies must gain nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow

import xray
from benchmarks.machine import line, machine, table

PROMPTS, SAMPLES, MAX_NEW_TOKENS = 32, 8, 4
ITERATIONS, PAIRS = 30, 600
CONTROL = "shuffled"
LESSON = importlib.import_module("examples.lessons.05_grpo_with_a_verifier")


def correct(prompts: list[str], replies: list[str]) -> list[float]:
    """1 for the right reply, 0 for any other."""
    return [float(reply.strip() == max(prompt.split())) for prompt, reply in zip(prompts, replies, strict=True)]


def shuffled(prompts: list[str], replies: list[str]) -> list[float]:
    """The same number of right replies, but assigned at random."""
    scores = correct(prompts, replies)
    random.Random("".join(replies)).shuffle(scores)
    return scores


Reward = Callable[[list[str], list[str]], list[float]]
Train = Callable[[xray.Handle, xray.Handle, str], xray.Handle]
"""(the SFT model, the dataset, a name for the stages) → the policy."""


def by_gradient(method: xray.Method, reward: Reward) -> Train:
    """A stage of policy gradients."""

    def train(sft: xray.Handle, data: xray.Handle, name: str) -> xray.Handle:
        samples: dict[str, Any] = {} if method in ("ppo", "reinforce++") else {"samples_per_prompt": SAMPLES}
        prompts = PROMPTS if samples else PROMPTS * SAMPLES
        return xray.ppo(
            sft,
            prompts=data,
            rewards=[xray.reward(reward)],
            method=method,
            iterations=ITERATIONS,
            prompts_per_iteration=prompts,
            minibatch_size=64,
            max_new_tokens=MAX_NEW_TOKENS,
            lr=1e-3,
            reward_scaling="none",
            name=name,
            **samples,
        )

    return train


def by_dpo(sft: xray.Handle, data: xray.Handle, name: str) -> xray.Handle:
    """Pairs of a right and a wrong reply, sampled once."""
    pairs = xray.preferences(
        policy=sft,
        data=data,
        source="rewards",
        rewards=[xray.reward(correct)],
        num_prompts=PAIRS,
        samples=SAMPLES,
        max_new_tokens=MAX_NEW_TOKENS,
        name=f"{name}-pairs",
    )
    # At five times this rate right replies become less likely too, wherever that widens the margin.
    return xray.dpo(sft, pairs, reference=sft, epochs=3, batch_size=32, lr=2e-4, name=name)


def by_best_of_n(sft: xray.Handle, data: xray.Handle, name: str) -> xray.Handle:
    """Two rounds of rejection sampling."""
    policy = sft
    for number in (1, 2):
        kept = xray.best_of_n(
            policy,
            data,
            rewards=[xray.reward(correct)],
            min_reward=1.0,
            num_prompts=PAIRS,
            samples=SAMPLES,
            max_new_tokens=MAX_NEW_TOKENS,
            name=f"{name}-kept-{number}",
        )
        policy = xray.sft(policy, data=kept, steps=100, max_response_tokens=4, lr=1e-3, name=f"{name}-sft-{number}")
    return policy


METHODS: dict[str, Train] = {
    "ppo": by_gradient("ppo", correct),
    "grpo": by_gradient("grpo", correct),
    "rloo": by_gradient("rloo", correct),
    "reinforce++": by_gradient("reinforce++", correct),
    "best_of_n": by_best_of_n,
    "dpo": by_dpo,
    CONTROL: by_gradient("grpo", shuffled),
}


@flow(task_runner=xray.task_runner(), persist_result=False)
def learning(output: Path, seeds: int, methods: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Method → the evaluation of each seed."""
    problems = output / "problems.jsonl"
    LESSON.write_problems(problems)
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for seed in range(seeds):
        with xray.workspace(output, project="learning", seed=seed):
            data, sft = LESSON.half_right(problems)
            for method in methods:
                name = method.replace("+", "p").replace("_", "-")
                judged = xray.evaluate(
                    METHODS[method](sft, data, name),
                    against=sft,
                    prompts=data,
                    rewards=[xray.reward(correct)],
                    num_prompts=512,
                    max_new_tokens=MAX_NEW_TOKENS,
                    name=f"{name}-evaluate",
                )
                # One after the other: side by side they need the memory of all.
                found[method].append(json.loads((judged.result().path / "evaluation.json").read_text()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--output", type=Path, default=Path("runs/learning"))
    options = parser.parse_args()
    found = learning(options.output.absolute(), options.seeds, options.methods)
    print(f"{machine()}; {options.seeds} seeds, {found[options.methods[0]][0]['samples']} held-out problems\n")
    table(("method", *(f"seed {seed}: before → after" for seed in range(options.seeds)), "learns"), [])
    for method, evaluations in found.items():
        cells = []
        for e in evaluations:
            low, high = e["reward_delta_ci95"]
            cells.append(f"{e['reward_before']:.3f} → {e['reward_after']:.3f} ({low:+.3f} to {high:+.3f})")
        rises = sum(e["reward_delta_ci95"][0] > 0 for e in evaluations)
        line((method, *cells, f"{rises} of {len(evaluations)}"))


if __name__ == "__main__":
    main()
