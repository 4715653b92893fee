"""Sequences in one row after the other, [N, …], and as padded rows, [B, S, …]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def pad(flat: Tensor, lengths: Tensor) -> Tensor:
    """Sequences of these `lengths` [B], [N, …] together, as rows [B, S, …] with 0 on the right."""
    return pad_sequence(list(flat.split(lengths.tolist())), batch_first=True)


def unpad(rows: Tensor, lengths: Tensor) -> Tensor:
    """The inverse of `pad`."""
    return torch.cat([row[:length] for row, length in zip(rows.unbind(), lengths.tolist(), strict=True)])
