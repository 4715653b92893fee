"""The work of `benchmarks.peers`: sizes of models, amounts of work, rows of text. Both sides import it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THREADS = 2
"""X-ray's default of `runtime.threads`, and so many cores TRL may use."""
SEED = 0
KL = 0.05
"""Weight of PPO's penalty."""
GRPO_KL = 0.04
BETA = 0.1
"""Of DPO and KTO."""
PENALTY = 1.0
"""PPO: what a truncated reply loses."""
LR = 3e-4
METHODS = ("sft", "reward", "dpo", "kto", "grpo", "ppo", "ppo-shared")
SAMPLING = ("grpo", "ppo", "ppo-shared")
"""Methods that sample replies."""
LAST_WITH_PPO, NEWEST = "1.11.0", "1.16.0"
"""Versions of TRL."""
FIXED_TOKENS = 32
"""Tokens of each message with `--lengths fixed`."""


@dataclass(frozen=True)
class Size:
    """A policy and the rows of one update."""

    base: dict[str, Any]
    """Fields of `xray.fresh_base`, or `model` of `xray.base`."""
    rows: int
    """Conversations of an SFT step, replies of a KTO step."""
    pairs: int
    """Pairs of a DPO or reward-model step."""
    groups: int
    """Prompts of a GRPO iteration, with `SAMPLES` replies each, in two optimizer steps."""
    prompts: int
    """Prompts of a PPO iteration, in `2 × EPOCHS` optimizer steps."""


SAMPLES, EPOCHS = 8, 4
_OURS = {"num_layers": 4, "num_heads": 5, "num_kv_heads": 5, "max_positions": 128}
SIZES = {
    "1.6M": Size(_OURS | {"vocab_size": 2048, "hidden_size": 160, "intermediate_size": 448}, 64, 32, 16, 32),
    "18M": Size(
        _OURS
        | {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024}
        | {"num_layers": 8, "num_heads": 6, "num_kv_heads": 6},
        32,
        16,
        8,
        16,
    ),
    "135M": Size({"model": "smollm2-135m"}, 16, 8, 8, 8),
}


def new_tokens(lengths: str) -> int:
    """The most tokens of a sampled reply."""
    return FIXED_TOKENS if lengths == "fixed" else 16


def share_of_e(prompts: list[str], replies: list[str]) -> list[float]:
    """A reward that asks for no other length: the share of the letter e."""
    return [reply.count("e") / max(len(reply), 1) for reply in replies]


def of_fixed_length(tokenizer: Any) -> Callable[[str], str | None]:
    """Texts → texts of exactly `FIXED_TOKENS` tokens, or None where none was found."""

    def cut(text: str) -> str | None:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for end in range(FIXED_TOKENS, min(len(ids), FIXED_TOKENS + 4)):
            found = tokenizer.decode(ids[:end]).strip()
            if len(tokenizer(found, add_special_tokens=False)["input_ids"]) == FIXED_TOKENS:
                return str(found)
        return None

    return cut


def _messages(turns: list[str], cut: Callable[[str], str | None] | None, rng: random.Random) -> Iterator[str]:
    """Turns as they are, or long texts of several, cut to one length."""
    for turn in turns:
        if cut is None:
            yield turn
        elif (text := cut(" ".join([turn, *rng.choices(turns, k=12)]))) is not None:
            yield text


def write_rows(directory: Path, count: int, cut: Callable[[str], str | None] | None) -> tuple[Path, Path]:
    """Write `count` conversations of two messages and as many pairs, whose rejected reply is another prompt's.

    Returns (conversations, pairs), as JSON Lines.
    """
    from xray_runtime.data.reading.sources import chitchat_conversations

    directory.mkdir(parents=True, exist_ok=True)
    chats, pairs = directory / "chats.jsonl", directory / "pairs.jsonl"
    turns = dict.fromkeys(turn for chat in chitchat_conversations() for turn in chat.turns if 8 <= len(turn) <= 60)
    rng = random.Random(SEED)
    messages = _messages(list(turns), cut, rng)
    rows = [(next(messages), next(messages), next(messages)) for _ in range(count)]
    with chats.open("w", encoding="utf-8") as chat_lines, pairs.open("w", encoding="utf-8") as pair_lines:
        for prompt, reply, other in rows:
            said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
            chat_lines.write(json.dumps({"messages": said}) + "\n")
            pair_lines.write(json.dumps({"prompt": prompt, "chosen": reply, "rejected": other}) + "\n")
    return chats, pairs
