"""Flat tensors that a test writes down, as the batch that objectives read."""

from __future__ import annotations

import torch
from torch import Tensor

from xray_runtime.data.batch import LabelledBatch, PairBatch, PolicyBatch, TextBatch
from xray_runtime.data.ragged import Ragged

IDS = ("input_ids", "rejected_ids")


def batch(columns: dict[str, Tensor]) -> TextBatch[Tensor]:
    """The columns as the kind of batch that has them; `lengths` and `rejected_lengths` [B] are those of the token ids,
    any other column with a number a response token is split by them."""
    offsets = {
        name: torch.cat([columns[lengths].new_zeros(1), columns[lengths].cumsum(0)])
        for name, lengths in zip(IDS, ("lengths", "rejected_lengths"), strict=True)
        if lengths in columns
    }
    prompts = columns["prompt_lengths"].cumsum(0)
    replies = offsets["input_ids"] - torch.cat([prompts.new_zeros(1), prompts])
    texts = offsets | {"trunk": offsets["input_ids"]}
    per_row = ("prompt_lengths", "alike", "added_ends", "desirable", "ref_chosen", "ref_rejected", "ref_reply_logprobs")
    given = {name: column for name, column in columns.items() if not name.endswith("lengths") or name in per_row}
    kinds = {"rejected_ids": PairBatch, "desirable": LabelledBatch, "advantages": PolicyBatch}
    kind = next((kind for name, kind in kinds.items() if name in columns), TextBatch)
    found = {
        name: column if name in per_row else Ragged(column, texts.get(name, replies)) for name, column in given.items()
    }
    return kind.of_columns({name: column for name, column in found.items() if name in kind.declared()})


def split(column: Ragged[Tensor]) -> list[Tensor]:
    """The values of each row."""
    return list(column.values.split(column.lengths.tolist()))
