"""A game of two seats, both played by one policy: a keeper knows a number from 0 to 3, an asker guesses it.

The keeper reads the number and each guess and says "higher", "lower" or "yes"; the asker hears what the keeper said,
whether it is true or not. The asker earns for a number found soon, the keeper for the share of its answers that are
true. The demonstrations heed and tell the truth half of the time. Each seat has rows of its own, compared with those of
the same seat: by GRPO within a group, or by RAE with the seat's own past. Minutes on two cores:

    xray run examples.guess_together:guess_together
    xray run examples.guess_together:guess_together --set method=rae
    xray rollouts ppo --output runs/guess-together --iteration 79
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow

import xray

SIZE, GUESSES = 4, 2
ASKER, KEEPER = "asker", "keeper"


def truth(number: int, guess: int) -> str:
    return "yes" if guess == number else "higher" if guess < number else "lower"


class GuessTogether:
    """The asker gets 1 for the number, 0.1 less for each guess before it; the keeper its share of true answers."""

    def reset(self, task: Mapping[str, Any], seed: int) -> xray.Start:
        self.number, self.guesses, self.true = random.Random(seed).randrange(SIZE), 0, 0
        self.awaits_answer = False
        return xray.Start([{"role": "user", "content": f"Game {seed % 1000}"}], seat=ASKER)

    def step(self, reply: str) -> xray.Step:
        return self.answered(reply.strip()) if self.awaits_answer else self.guessed(reply.strip())

    def guessed(self, guess: str) -> xray.Step:
        self.awaits_answer, self.guesses = True, self.guesses + 1
        # None where the reply is not a number in range: the keeper then answers anything, and the game ends.
        self.guess = int(guess) if guess in map(str, range(SIZE)) else None
        asked = f"Number {self.number} guess {self.guess}"
        return xray.Step([{"role": "user", "content": asked}], seat=KEEPER)

    def answered(self, answer: str) -> xray.Step:
        self.awaits_answer = False
        self.true += self.guess is not None and answer == truth(self.number, self.guess)
        found = self.guess == self.number
        if not found and self.guess is not None and self.guesses < GUESSES:
            return xray.Step([{"role": "user", "content": answer or "?"}], seat=ASKER)
        asker = 1.1 - 0.1 * self.guesses if found else 0.0
        return xray.Step(terminated=True, rewards={ASKER: asker, KEEPER: self.true / self.guesses})


def write_games(path: Path, count: int = 2000) -> None:
    """Conversations of both seats, by somebody who heeds and tells the truth half of the time."""
    draw, lines = random.Random(0), []
    for opening in range(count):
        number, low, high = draw.randrange(SIZE), 0, SIZE - 1
        asker: list[dict[str, str]] = [{"role": "user", "content": f"Game {opening % 1000}"}]
        keeper: list[dict[str, str]] = []
        for _ in range(GUESSES):
            guess = draw.randint(low, high) if draw.random() < 0.5 and low <= high else draw.randrange(SIZE)
            said = truth(number, guess) if draw.random() < 0.5 else draw.choice(["yes", "higher", "lower"])
            asker += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": said}]
            keeper += [{"role": "user", "content": f"Number {number} guess {guess}"}]
            keeper += [{"role": "assistant", "content": said}]
            low, high = (low, min(high, guess - 1)) if said == "lower" else (max(low, guess + 1), high)
            if guess == number:
                break
        lines += [json.dumps({"messages": asker[:-1]}) + "\n", json.dumps({"messages": keeper}) + "\n"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


@flow(task_runner=xray.task_runner(), persist_result=False)
def guess_together(
    output: str = "runs/guess-together", seed: int = 0, method: xray.Method = "grpo", iterations: int = 80
) -> None:
    """From a keeper that tells the truth now and then to one that does; the asker, which needs luck, gains little."""
    with xray.workspace(output, project="guess-together", seed=seed):
        games = Path(output).absolute() / "games.jsonl"
        write_games(games)
        data = xray.prepare(source=str(games), min_chars=1, max_prompt_tokens=64, context_messages=None)
        base = xray.fresh_base(data, vocab_size=300, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4)
        sft = xray.sft(base, data=data, steps=400, batch_size=64, lr=2e-3)
        xray.ppo(
            sft,
            prompts=data,
            method=method,
            environment={
                "path": GuessTogether,
                "seats": [ASKER, KEEPER],
                "max_turns": 2 * GUESSES,
                "max_tokens": 96,
            },
            iterations=iterations,
            prompts_per_iteration=16,
            samples_per_prompt=8,
            minibatch_size=64,
            max_new_tokens=4,
            lr=1e-3,
        )
