"""Data that does not fit: conversations prepared, tokenized, and taken as an SFT stage takes them.

    python -m benchmarks.data [--conversations 100000 250000]

Conversations are turns of `chitchat`, drawn at random until a prompt and a reply have some 130 tokens. Each step runs
in a process of its own; `apply_chat_template` is transformers' own tokenizing of the same, to hold ours against. Memory
is the peak of a process's resident set, less what it had with everything imported.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import MIB, line, machine, table
from xray_runtime.config.prepare import DataConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.data.batching import Cursor
from xray_runtime.data.conversations import ConversationTokens
from xray_runtime.data.pairs import TRAIN, Example, Pairs, prompt_text
from xray_runtime.data.sources import chitchat_conversations
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.data.tokens import in_shards
from xray_runtime.graph.kind import NoInputs, Stage
from xray_runtime.preparation import prepare
from xray_runtime.store.seal import process_seal

CHARACTERS = 145
"""Of a prompt and of a reply, at least: some 130 tokens in all."""
VOCAB_SIZE, TOKENIZER_ROWS = 2048, 5000
BATCHES, BATCH_SIZE = 1000, 32
STEPS = ("prepare", "tokenize", "apply_chat_template", "train")


class Silent:
    """A recorder that nobody listens to."""

    def progress(self, *_: Any) -> None: ...

    def metrics(self, *_: Any, **__: Any) -> None: ...

    def table(self, *_: Any) -> None: ...


def write_source(path: Path, count: int) -> None:
    """`count` conversations in JSON Lines; fewer are the first ones of more."""
    rng = random.Random(0)
    turns = [turn for conversation in chitchat_conversations() for turn in conversation.turns]

    def said() -> str:
        text = rng.choice(turns)
        while len(text) < CHARACTERS:
            text += " " + rng.choice(turns)
        return text

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = [{"role": role, "content": said()} for role in ("user", "assistant")]
            file.write(json.dumps({"messages": messages}) + "\n")


def run_prepare(source: Path, out: Path) -> dict[str, float]:
    config = DataConfig(source=str(source), max_chars=10**6, max_prompt_tokens=512)
    stage: Any = Stage("prepare", 0, config, NoInputs(), RuntimeConfig(), None)  # type: ignore[arg-type]
    out.mkdir()
    recorder: Any = Silent()
    prepare.run(stage, out, recorder)
    return {"bytes": source.stat().st_size}


def run_tokenize(out: Path, tokenizer: Any) -> dict[str, float]:
    tokens = ConversationTokens(out / TRAIN, tokenizer, 512, 512, process_seal())
    taken = (tokens.take(range(start, min(start + 1024, len(tokens)))) for start in range(0, len(tokens), 1024))
    return {"tokens": float(sum(len(rows["input_ids"].values) for rows in taken))}


def run_plain(out: Path, tokenizer: Any) -> dict[str, float]:
    """The library's own call on the same conversations: no masks, no guard against forged turns, nothing kept."""
    total = 0
    for batch in in_shards(Pairs(out / TRAIN, Example)):
        conversations = [[*pair.prompt, {"role": "assistant", "content": pair.response}] for pair in batch]
        total += sum(map(len, tokenizer.apply_chat_template(conversations, return_dict=False)))
    return {"tokens": float(total)}


def run_train(out: Path, tokenizer: Any) -> dict[str, float]:
    """What the controller of an SFT stage does with data: open it, choose what fits, take batches."""
    there = "the tokens should be there"
    tokens = ConversationTokens(out / TRAIN, tokenizer, 512, 512, process_seal(), lambda *_: sys.exit(there))
    cursor = Cursor(len(tokens), seed=0)
    opened = time.perf_counter()
    for _ in range(BATCHES):
        tokens.take(cursor.take(BATCH_SIZE))
    return {"ms_a_batch": (time.perf_counter() - opened) / BATCHES * 1e3}


def tokenizer_of(out: Path) -> Any:
    examples = islice(Pairs(out / TRAIN, Example), TOKENIZER_ROWS)
    return train_tokenizer((text for e in examples for text in (prompt_text(e.prompt), e.response)), VOCAB_SIZE)


def run_step(step: str, directory: Path) -> dict[str, float]:
    """One step in this process: seconds, CPU seconds, memory in MiB, and what it says itself."""
    source, out = directory / "source.jsonl", directory / "prepare"
    tokenizer = tokenizer_of(out) if step != "prepare" else None
    if tokenizer is not None:
        tokenizer("what is imported at the first use")
    np.zeros(1)
    before, start, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    facts = {
        "prepare": lambda: run_prepare(source, out),
        "tokenize": lambda: run_tokenize(out, tokenizer),
        "apply_chat_template": lambda: run_plain(out, tokenizer),
        "train": lambda: run_train(out, tokenizer),
    }[step]()
    return facts | {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "peak": resident("VmHWM"),
        "data": resident("VmHWM") - before,
    }


def resident(field: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(text for text in lines if text.startswith(field)).split()[1]) * 1024 / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, nargs="+", default=[100_000, 250_000])
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(run_step(options.step, options.directory)))
        return
    print(machine(), "\n")
    table(["conversations", "step", "seconds", "CPU-s", "rate", "peak, MiB", "of it for data"], [])
    with tempfile.TemporaryDirectory() as root:
        for count in options.conversations:
            directory = Path(root) / str(count)
            directory.mkdir()
            write_source(directory / "source.jsonl", count)
            for step in STEPS:
                command = [sys.executable, "-m", "benchmarks.data", "--step", step, "--directory", str(directory)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                facts = json.loads(done.stdout.splitlines()[-1])
                rates = {
                    "prepare": lambda f: f"{f['bytes'] / 1e6 / f['cpu']:.1f} MB a CPU-s",
                    "tokenize": lambda f: f"{f['tokens'] / f['cpu'] / 1e3:.0f} k tokens a CPU-s",
                    "apply_chat_template": lambda f: f"{f['tokens'] / f['cpu'] / 1e3:.0f} k tokens a CPU-s",
                    "train": lambda f: f"{f['ms_a_batch']:.2f} ms a batch",
                }
                row = [f"{count:,}", step, f"{facts['seconds']:.1f}", f"{facts['cpu']:.1f}", rates[step](facts)]
                line([*row, f"{facts['peak']:.0f}", f"{facts['data']:.0f}"])


if __name__ == "__main__":
    main()
