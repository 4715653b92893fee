"""Flat tensors that a test writes down, as the batch that objectives read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xray_runtime.data.batch import LabelledBatch, PairBatch, PolicyBatch, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.models.heads import HeadedLM

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


PAIRS = [([5, 9, 7], [42, 11, 6, 1]), ([8, 100], [3]), ([20, 21, 22, 23, 24], [25, 1]), ([7, 7, 7], [60, 61, 62])]


def distributions(lm: Any, prompt: list[int], reply: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probabilities [T, V] of every token at each place of one reply, unpadded."""
    logits = lm(input_ids=torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)


def reply_logprobs(lm: Any, prompt: list[int], reply: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probabilities [T] of one reply's tokens, unpadded."""
    return distributions(lm, prompt, reply, temperature)[range(len(reply)), reply]


def states(module: HeadedLM, prompt: list[int], reply: list[int]) -> Tensor:
    """Last hidden states [T + 1, H] before each token of one reply and after the last, unpadded."""
    with torch.no_grad():
        return module.lm.model(input_ids=torch.tensor([prompt + reply])).last_hidden_state[0, len(prompt) - 1 :]


def gradients(module: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named, found, strict=True)}


def select(rows: dict[str, Tensor], index: list[int]) -> dict[str, Tensor]:
    """Some rows."""
    num_tokens = rows["lengths"] - rows["prompt_lengths"]
    sizes = {"input_ids": rows["lengths"], "rejected_ids": rows.get("rejected_lengths")}
    sizes |= dict.fromkeys(COLUMNS, num_tokens)

    def some(name: str, column: Tensor) -> Tensor:
        if (lengths := sizes.get(name)) is None:
            return column[index]
        parts = column.split(lengths.tolist())
        return torch.cat([parts[i] for i in index])

    return {name: some(name, column) for name, column in rows.items()}


COLUMNS = ("old_logprobs", "advantages", "weights", "values", "returns")
"""Columns of response tokens."""


def rollout(rows: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Random columns of a rollout, off-policy enough to be clipped here and there."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = int((rows["lengths"] - rows["prompt_lengths"]).sum())
    noise = torch.randn(5, num_tokens, dtype=torch.float64, generator=generator)
    columns = dict(zip(COLUMNS, noise, strict=True))
    columns["old_logprobs"] = columns["old_logprobs"] * 0.5 - 5.7  # about the log of one token among 280
    columns["weights"] = columns["weights"].abs()
    return rows | columns
