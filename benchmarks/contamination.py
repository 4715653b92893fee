"""How much of what is planted in training data the audit's search for overlaps finds, how much else, and at what cost.

Spans of held-out prompts are planted in other people's conversations: as they are, with other case and marks, and with
one word in ten replaced, which no search for equal words finds whole. What is found without having been planted is
looked up in the texts: it stands there, or it is a false one.

    python -m benchmarks.contamination --conversations 20000
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from xray_runtime.data.sources import chitchat_conversations
from xray_runtime.data.spans import SPAN_WORDS, SpanSet, words_of

PLANTED = 400
Change = Callable[[list[str], random.Random], list[str]]


def as_it_is(words: list[str], _: random.Random) -> list[str]:
    return words


def other_case_and_marks(words: list[str], rng: random.Random) -> list[str]:
    return [
        rng.choice([str.upper, str.title, str.lower])(word) + rng.choice(["", ",", "\n", " --", "!"]) for word in words
    ]


def one_word_in_ten_replaced(words: list[str], rng: random.Random) -> list[str]:
    return [f"replaced{rng.randrange(99)}" if rng.random() < 0.1 else word for word in words]


CHANGES: list[Change] = [as_it_is, other_case_and_marks, one_word_in_ten_replaced]


def main(
    conversations: Annotated[int, typer.Option(help="Training conversations, repeated beyond 7,000 or so.")] = 20_000,
    seed: int = 0,
) -> None:
    rng = random.Random(seed)
    said = [" ".join(conversation.turns) for conversation in chitchat_conversations()]
    rng.shuffle(said)
    said = [text for text in said if len(words_of(text)) >= 3 * SPAN_WORDS]
    asked, others = said[: 2 * PLANTED], said[2 * PLANTED :]
    prompts = [" ".join(text.split()[: rng.randrange(SPAN_WORDS + 2, 60)]) for text in asked]
    planted, clean = prompts[:PLANTED], prompts[PLANTED:]
    table = Table("planted", "found of planted", "flagged without", "of them truly there", "CPU-s", "rows / CPU-s")
    for change in CHANGES:
        rows = [others[i % len(others)] for i in range(conversations)]
        for number, prompt in enumerate(planted):
            words = prompt.split()
            start = rng.randrange(len(words) - SPAN_WORDS + 1)
            length = rng.randrange(SPAN_WORDS, len(words) - start + 1)
            changed = " ".join(change(words[start : start + length], rng))
            row = rows[number].split()
            place = rng.randrange(len(row))
            rows[number] = " ".join([*row[:place], changed, *row[place:]])
        began = time.process_time()
        ours = SpanSet(prompts)
        found = ours.found_in(rows)
        seconds = time.process_time() - began

        def flagged(prompt: str, ours: SpanSet = ours, found: np.ndarray = found) -> bool:
            return bool(np.isin(ours.hashes(prompt), found).any())

        extra = [prompt for prompt in clean if flagged(prompt)]
        texts = [f" {' '.join(words_of(row))} " for row in rows]
        there = sum(_stands_in(prompt, texts) for prompt in extra)
        recall = sum(map(flagged, planted)) / PLANTED
        table.add_row(
            change.__name__.replace("_", " "),
            f"{recall:.3f}",
            f"{len(extra)} of {len(clean)}",
            str(there),
            f"{seconds:.2f}",
            f"{conversations / seconds:,.0f}",
        )
    Console().print(table)


def _stands_in(prompt: str, texts: list[str]) -> bool:
    words = words_of(prompt)
    spans = [f" {' '.join(words[i : i + SPAN_WORDS])} " for i in range(len(words) - SPAN_WORDS + 1)]
    return any(span in text for text in texts for span in spans)


if __name__ == "__main__":
    typer.run(main)
