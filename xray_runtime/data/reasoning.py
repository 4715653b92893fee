"""The reasoning of a reply apart from its answer, in the text of a whole reply.

    <think>
    reasoning
    </think>

    answer

A reply without a `<think>` block at its beginning is all answer; one that ends within the block is all reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

OPEN, CLOSE = "<think>", "</think>"
KEY = "reasoning_content"
"""The reasoning of an assistant's message."""
BLOCK = re.compile(rf"\s*{OPEN}\n?(.*?)(?:\n?{CLOSE}\n{{0,2}}(.*)|\Z)", re.DOTALL)


def split_reasoning(text: str) -> tuple[str | None, str]:
    """(reasoning or None, answer) of a whole reply."""
    match = BLOCK.fullmatch(text)
    return (None, text) if match is None else (match[1], match[2] or "")


def with_reasoning(reasoning: str | None, answer: str) -> str:
    """The whole reply; `split_reasoning` gives both back, unless the reasoning contains `</think>`."""
    return answer if reasoning is None else f"{OPEN}\n{reasoning}\n{CLOSE}\n\n{answer}"


def answers_of(texts: Sequence[str]) -> list[str]:
    """The answers of whole replies."""
    return [split_reasoning(text)[1] for text in texts]


def reasoning_of(texts: Sequence[str]) -> list[str | None]:
    """The reasoning of whole replies."""
    return [split_reasoning(text)[0] for text in texts]
