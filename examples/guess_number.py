"""A game of several turns by GRPO: guess a number from 0 to 7, with "higher" or "lower" after each guess.

The demonstrations heed what they were told half of the time, so what SFT learns from them does too. Halving what is
left finds each number in at most four guesses; the policy comes nearer to that, with PPO faster. Minutes on two cores:

    xray run examples.guess_number:guess_number
    xray run examples.guess_number:guess_number --set method=ppo
    xray rollouts ppo --output runs/guess-number --iteration 39
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow

import xray

SIZE, GUESSES = 8, 4


class GuessNumber:
    """1 for the number, 0.1 less for each guess before it; nothing for what is no number."""

    def reset(self, task: Mapping[str, Any], seed: int) -> xray.Start:
        self.number, self.guesses = random.Random(seed).randrange(SIZE), 0
        # A row of the dataset may be the middle of another game.
        return xray.Start([dict(task["messages"][0])])

    def step(self, reply: str) -> xray.Step:
        self.guesses += 1
        guess = reply.strip()
        if guess == str(self.number):
            return xray.Step(reward=1.1 - 0.1 * self.guesses, terminated=True)
        if self.guesses == GUESSES or guess not in map(str, range(SIZE)):
            return xray.Step(terminated=True)
        hint = "higher" if int(guess) < self.number else "lower"
        return xray.Step([{"role": "user", "content": hint}])


def write_games(path: Path, count: int = 2000) -> None:
    """Conversations of somebody who heeds a hint half of the time."""
    random_ = random.Random(0)
    lines = []
    for number in range(count):
        # Different openings, so that some can be held out.
        messages = [{"role": "user", "content": f"Game {number}"}]
        game, said = GuessNumber(), xray.Step()
        game.reset({"messages": messages}, random_.randrange(2**31))
        low, high = 0, SIZE - 1
        while not said.terminated:
            guess = random_.randint(low, high) if random_.random() < 0.5 else random_.randrange(SIZE)
            said = game.step(str(guess))
            messages += [{"role": "assistant", "content": str(guess)}, *said.messages]
            low, high = (low, min(high, guess - 1)) if guess > game.number else (max(low, guess + 1), high)
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def start(directory: Path) -> tuple[xray.Handle, xray.Handle]:
    """(games, a model trained on them): what learning begins with. Call it in a workspace."""
    games = directory / "games.jsonl"
    write_games(games)
    # A guess depends on all that was said before it.
    data = xray.prepare(source=str(games), min_chars=1, max_prompt_tokens=64, context_messages=None)
    base = xray.fresh_base(data, vocab_size=300, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4)
    return data, xray.sft(base, data=data, steps=400, batch_size=64, lr=4e-3)


PLAYED: dict[str, Any] = {
    "environment": {"path": GuessNumber, "max_turns": GUESSES, "max_tokens": 64},
    "max_new_tokens": 4,
}


@flow(task_runner=xray.task_runner(), persist_result=False)
def guess_number(
    output: str = "runs/guess-number", seed: int = 0, method: xray.Method = "grpo", iterations: int = 40
) -> None:
    """From guesses that heed a hint now and then to guesses that do so more often."""
    with xray.workspace(output, project="guess-number", seed=seed):
        data, sft = start(Path(output).absolute())
        samples = 8 if method != "ppo" else 1
        policy = xray.ppo(
            sft,
            prompts=data,
            method=method,
            iterations=iterations,
            prompts_per_iteration=128 // samples,
            samples_per_prompt=samples,
            lr=1e-3,
            **PLAYED,
        )
        for name, model in {"before": sft, "after": policy}.items():
            xray.benchmark(model, prompts=data, suite="environment", success=0.5, name=name, **PLAYED)
