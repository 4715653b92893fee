"""The branches of agents' episodes as rows for the models.

An agent's episode is one row of a rollout, like any other: the first branch's prompt, then the tokens that follow it in
each branch, one branch after the other. Only models read branches one by one, each after its own prompt:

    the row          prompt 1  tokens 1  tokens 2
    the models       prompt 1  tokens 1
                     prompt 2  tokens 2

So a column over response tokens has the same values in both forms, and only other offsets. `branches` holds, for each
branch, the numbers of prompt and response tokens, then the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from xray_runtime.data.batch import Scores, TextBatch
from xray_runtime.data.ragged import Ragged, Values

ID_STEP = 2**32
"""Added to a row's `id` for each further branch."""


def encoded_branches(rows: Sequence[BranchRow]) -> list[int]:
    """The branches of one episode as numbers."""
    return [number for row in rows for number in (len(row.prompt), len(row.ids), *row.prompt)]


def decoded_branches(numbers: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """(prompt, number of response tokens) of each branch."""
    start = 0
    while start < len(numbers):
        end = start + 2 + int(numbers[start])
        yield numbers[start + 2 : end], int(numbers[start + 1])
        start = end


T = TypeVar("T", bound=TextBatch)


def split_branches(rows: TextBatch, branches: Ragged | None) -> tuple[TextBatch, Callable[[Scores], Scores]]:
    """(rows for the models, function that undoes the split in their outputs); None: not the episodes of agents."""
    if branches is None:
        return rows, lambda outputs: outputs
    split = BranchRows.of(rows, branches)
    return split.rows, split.merged


@dataclass(frozen=True)
class BranchRows(Generic[T]):
    """Rows for the models, and how to undo the split."""

    rows: T
    """One row a branch."""
    counts: np.ndarray
    """Number of branches of each episode [B]."""
    offsets: np.ndarray
    """Offsets of the episodes' response tokens."""

    @staticmethod
    def of(rows: T, branches: Ragged) -> BranchRows[T]:
        """Split rows; columns of response tokens are split, others repeated."""
        split = [list(decoded_branches(numbers)) for numbers in branches]
        counts = np.array([len(branches) for branches in split])
        lengths = np.array([length for branches in split for _, length in branches])
        fine = np.cumsum([0, *lengths], dtype=np.int64)
        text = zip(rows.input_ids, rows.prompt_lengths, strict=True)
        responses = Ragged(np.concatenate([ids[start:] for ids, start in text]), fine)
        batch = TextBatch.of([prompt for branches in split for prompt, _ in branches], responses)
        if "id" in rows:
            numbers = np.concatenate([np.arange(count) for count in counts])
            batch = batch.with_columns(id=np.repeat(rows.id, counts) + ID_STEP * numbers)
        others: dict[str, Values] = {
            name: Ragged(column.values, fine) if isinstance(column, Ragged) else np.repeat(column, counts)
            for name, column in rows.columns().items()
            if name not in batch and name != "branches"
        }
        split_rows = batch.as_kind(type(rows), **others)
        return BranchRows(split_rows, counts, np.concatenate([[0], fine[np.cumsum(counts)]]))

    def merged(self, outputs: Scores) -> Scores:
        """Outputs of models on `rows` as columns of episodes; a number of a row is that of the last branch."""
        last = np.cumsum(self.counts) - 1
        columns: dict[str, Values] = {
            name: Ragged(column.values, self.offsets) if isinstance(column, Ragged) else column[last]
            for name, column in outputs.columns().items()
        }
        return Scores.of_columns(columns)


@dataclass(frozen=True)
class BranchRow:
    """One branch of an episode, to train on."""

    prompt: list[int]
    """Tokens before the first reply of the branch; without loss."""
    ids: list[int]
    """Replies, and the observations between them. These four are of one length."""
    logprobs: list[float]
    sampled: list[bool]
    """True: in the loss."""
    versions: list[int | None]
    """The policy's, of tokens in the loss."""
