"""A model that calls a tool: it knows one conversation by heart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.unit.agents.environments import samples
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.methods.common.environment_protocol import Start
from xray_runtime.models.causal_lm import fresh_llama, save_model
from xray_runtime.models.config import FreshBase

SMALL = FreshBase(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=128, max_positions=512)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
STEPS = 150


def conversation() -> list[dict[str, Any]]:
    """Of two replies; the first message has the tools of `samples.calculator`."""
    start = samples.calculator().reset({}, 0)
    assert isinstance(start, Start)
    return [
        {"role": "user", "content": "1 and 2", "tools": start.tools},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "1 and 2 is 3"},
    ]


def save_caller(directory: Path) -> None:
    """Train it, which takes seconds, and write it as a checkpoint."""
    torch.manual_seed(0)
    messages = conversation()
    tokenizer = train_tokenizer([str(messages)] * 20, 500)
    [turns] = chat_format(tokenizer).turns([(messages, [1, 3])])
    lm = fresh_llama(SMALL, tokenizer, seed=1)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    ids = torch.tensor([turns.ids])
    labels = torch.full_like(ids, -100)
    for start, end in turns.spans:
        labels[0, start:end] = ids[0, start:end]
    for _ in range(STEPS):
        lm(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_model(lm, tokenizer, directory)
