"""Rows as micro-batches of tensors, and what was computed of them back in the order of the rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from xray_runtime.cluster.micro_batches import as_arrays, as_tensors, joined
from xray_runtime.data.batch import PairBatch, PolicyBatch, Scores, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.engine import MicroBatch
from xray_runtime.models.objectives import of_responses, sequences


def test_a_micro_batch_is_the_same_batch_with_tensors() -> None:
    rows = TextBatch.of([[7], [7]], [[8], []])
    found = as_tensors(rows)
    assert type(found) is TextBatch
    assert list(found.columns()) == ["input_ids", "prompt_lengths", "alike"]
    assert found.input_ids.values.tolist() == [7, 8, 7]
    assert found.input_ids.lengths.tolist() == [2, 1]
    assert found.alike.tolist() == [0, 0]
    assert "alike" not in as_tensors(TextBatch(input_ids=rows.input_ids))


def test_pairs_go_through_a_model_one_side_after_the_other() -> None:
    chosen, rejected = TextBatch.of([[1], [2, 3]], [[4, 5], [6]]), TextBatch.of([[1], [2, 3]], [[7], [8, 9]])
    pairs = chosen.as_kind(PairBatch, rejected_ids=rejected.input_ids)
    texts = sequences(as_tensors(pairs))
    assert texts.input_ids.values.tolist() == [1, 4, 5, 2, 3, 6, 1, 7, 2, 3, 8, 9]
    assert texts.input_ids.offsets.tolist() == [0, 3, 6, 8, 12]
    assert texts.prompt_lengths.tolist() == [1, 2, 1, 2]
    assert as_tensors(pairs).alike.tolist() == [0, 1, 0, 1]


@given(replies=st.lists(st.integers(0, 4), min_size=1, max_size=12), data=st.data())
def test_scores_come_back_in_the_order_of_the_rows(replies: list[int], data: st.DataObject) -> None:
    """Whatever the micro-batches are; one that only fills up answers for no row."""
    rows = TextBatch.of([[row] for row in range(len(replies))], [[row] * n for row, n in enumerate(replies)])
    order = data.draw(st.permutations(range(len(replies))))
    size = data.draw(st.integers(1, len(replies)))
    groups = [list(order[start : start + size]) for start in range(0, len(order), size)]
    parts = []
    for number, group in enumerate([*groups, []]):
        texts = as_tensors(rows.take(group or [0]))
        flat = texts.input_ids.values[torch.cat([torch.arange(a + 1, b) for a, b in _bounds(texts)])]
        logprobs, nll = of_responses(flat.double(), texts), texts.prompt_lengths * 2.0
        scores = Scores(logprobs=logprobs, nll=nll, others={"judge": texts.alike})
        parts.append((MicroBatch(number, group, texts), as_arrays(scores)))
    found = joined(parts)
    assert [row.tolist() for row in found.logprobs] == [[row] * n for row, n in enumerate(replies)]
    assert found.logprobs.values.dtype == found.nll.dtype == np.float32
    assert found.nll.tolist() == [2.0] * len(replies)
    assert len(found.others["judge"]) == len(replies)


def _bounds(texts: TextBatch[torch.Tensor]) -> list[tuple[int, int]]:
    offsets = texts.input_ids.offsets.tolist()
    return list(pairwise(offsets))


def test_no_micro_batch_with_rows_gives_no_column() -> None:
    assert len(joined([])) == 0
    with pytest.raises(AttributeError, match=r"^this Scores has no column 'logprobs'$"):
        _ = joined([]).logprobs
    assert repr(PolicyBatch.of_columns({"input_ids": Ragged.of([[1]])})) == "PolicyBatch(1 rows: input_ids)"
