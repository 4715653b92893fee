"""What runs again after an outside input has changed: the table in `docs/identity-table.md`.

`python -m benchmarks.identity [FILE]` writes it in seconds: it compares the keys of stages, and runs none of them. Each
case makes an input of its kind, changes one byte of it, touches it, and copies it elsewhere. A stage whose key changed
counts as run again, and what it makes as changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import xray
from xray_runtime.kernel.config.allowed_imports import VARIABLE
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.graph import Graph, recording
from xray_runtime.kernel.graph.stage_identity import identify
from xray_runtime.kernel.store import content_digest
from xray_runtime.kernel.store.digest_memory import DigestMemory

TABLE = Path(__file__).parents[1] / "docs" / "identity-table.md"
RUNTIME = RuntimeConfig(device="cpu")
PACKAGE = "table_functions"
MODULES = {
    "__init__.py": "",
    "rewards.py": f'"""Rewards."""\nfrom {PACKAGE}.words import LIKED\n\n'
    "def polite(prompts, replies):\n    return [float(LIKED in r) for r in replies]  # share\n",
    "words.py": 'LIKED = "please"\n',
    "gold.py": "def score(prompts, replies):\n    return [1.0 for _ in replies]\n",
}
HUB = {"model": "someone/a-model", "source": "someone/a-dataset"}

Inputs = Mapping[str, str]
"""Field of the graph below → file, directory, name or function."""

PICTURE = """\
    chats  = prepare(source=…)          base   = base(model=…)
    sft    = sft(base, chats)           pairs  = preferences(path=…)
    judge  = reward_model(sft, pairs)   policy = ppo(sft, chats, rewards=[judge, reward(…)])
    result = evaluate(policy, sft, chats, gold=…)
    others = prepare(another source)
"""


def written(inputs: Inputs) -> Graph:
    """The graph of PICTURE."""
    with recording() as graph:
        chats = xray.prepare(source=inputs["source"], name="chats")
        base = xray.base(model=inputs["model"], name="base")
        sft = xray.sft(base, chats, name="sft")
        pairs = xray.preferences(source="dataset", path=inputs["path"], name="pairs")
        judge = xray.reward_model(sft, pairs, name="judge")
        rewards = [judge, xray.reward(inputs["function"])]
        policy = xray.ppo(sft, chats, rewards=rewards, name="policy")
        xray.evaluate(policy, sft, chats, rewards=[judge], gold=inputs["gold"], name="result")
        xray.prepare(source=inputs["other"], name="others")
    return graph


def keys(graph: Graph, memory: DigestMemory) -> dict[str, str]:
    """Stage → its key, as if each checkpoint's bytes followed from its key alone."""
    found: dict[str, str] = {}
    for call in graph.calls.values():
        parents = {role: hashlib.sha256(found[h.name].encode()).hexdigest() for role, h in call.parents.items()}
        identity, _ = identify(call.kind, call.name, call.config, call.seed, RUNTIME, parents, call.functions, memory)
        found[call.name] = identity.key
    return found


@dataclass(frozen=True)
class OutsideInput:
    """One kind of outside input."""

    title: str
    field: str
    """Of `Inputs`."""
    path: str | None
    """Below the folder of inputs; None: it is no file. Of a package of functions, its directory."""
    value: str
    """What the config says; of a path, nothing."""
    change: Callable[[Path], contextlib.AbstractContextManager[None]]
    """Changes it while the context lasts."""


@dataclass(frozen=True)
class IdentityRow:
    """What ran again."""

    title: str
    changed: list[str]
    touched: list[str] | None
    """None: it cannot be touched or copied."""
    copied: list[str] | None


def one_byte(
    name: str, old: bytes = b"", new: bytes = b""
) -> Callable[[Path], contextlib.AbstractContextManager[None]]:
    """Change the file `name` below the folder: `old` for `new`, by default its last byte."""

    @contextlib.contextmanager
    def change(folder: Path) -> Iterator[None]:
        path = folder / name
        before = path.read_bytes()
        after = before.replace(old, new) if old else before[:-1] + bytes([before[-1] ^ 1])
        assert after != before
        path.write_bytes(after)
        yield
        path.write_bytes(before)

    return change


@contextlib.contextmanager
def moved_commit(folder: Path) -> Iterator[None]:
    """The hub's names stand for other commits."""
    with patch.object(content_digest, "commit", lambda name, field, holds: f"{'b' * 32}{len(name):08}"):
        yield


def other_version(package: str) -> Callable[[Path], contextlib.AbstractContextManager[None]]:
    """Another version of a package is installed."""
    version = importlib.metadata.version

    def installed(name: str) -> str:
        return "99.0" if name == package else version(name)

    @contextlib.contextmanager
    def change(folder: Path) -> Iterator[None]:
        with patch.object(importlib.metadata, "version", installed):
            yield

    return change


CASES = [
    OutsideInput(".jsonl file", "source", "chats.jsonl", "", one_byte("chats.jsonl")),
    OutsideInput(".parquet file", "source", "chats.parquet", "", one_byte("chats.parquet")),
    OutsideInput("directory with a data set", "source", "chats", "", one_byte("chats/data/part-1.jsonl")),
    OutsideInput("data set on a hub, its commit moved", "source", None, HUB["source"], moved_commit),
    OutsideInput(
        "version of a package that carries data", "source", None, "chitchat", other_version("chitchat-dataset")
    ),
    OutsideInput("preference pairs, .jsonl", "path", "pairs.jsonl", "", one_byte("pairs.jsonl")),
    OutsideInput("directory of a base model", "model", "model", "", one_byte("model/model.safetensors")),
    OutsideInput("GGUF file", "model", "gguf/model.gguf", "", one_byte("gguf/model.gguf")),
    OutsideInput("tokenizer beside a GGUF file", "model", "gguf/model.gguf", "", one_byte("gguf/tokenizer.json")),
    OutsideInput("model on a hub, its commit moved", "model", None, HUB["model"], moved_commit),
    OutsideInput(
        "reward function",
        "function",
        "code",
        f"{PACKAGE}.rewards:polite",
        one_byte(f"code/{PACKAGE}/rewards.py", b"LIKED in r", b"LIKED>=r"),
    ),
    OutsideInput(
        "module that it imports",
        "function",
        "code",
        f"{PACKAGE}.rewards:polite",
        one_byte(f"code/{PACKAGE}/words.py", b"please", b"pleasd"),
    ),
    OutsideInput(
        "comment or docstring in it",
        "function",
        "code",
        f"{PACKAGE}.rewards:polite",
        one_byte(f"code/{PACKAGE}/rewards.py", b"# share", b"# shard"),
    ),
    OutsideInput(
        "gold function", "gold", "code", f"{PACKAGE}.gold:score", one_byte(f"code/{PACKAGE}/gold.py", b"1.0", b"2.0")
    ),
]


def measure(case: OutsideInput, folder: Path) -> IdentityRow:
    """What runs again, with inputs made in `folder`."""
    here, there = folder / "here", folder / "elsewhere"
    _make(here)
    memory = DigestMemory(folder / "digests.sqlite")

    def keys_in(directory: Path) -> dict[str, str]:
        with _imports_from(directory / "code"):
            return keys(written(_inputs(directory) | _value(case, directory)), memory)

    with patch.object(content_digest, "commit", lambda name, field, holds: f"{'a' * 32}{len(name):08}"):
        before = keys_in(here)

        def again(directory: Path) -> list[str]:
            after = keys_in(directory)
            return [stage for stage in before if after[stage] != before[stage]]

        with case.change(here):
            changed = again(here)
        if case.path is None:
            return IdentityRow(case.title, changed, None, None)
        for path in here.rglob("*"):
            os.utime(path)
        touched = again(here)
        shutil.copytree(here, there)
        return IdentityRow(case.title, changed, touched, again(there))


def measure_all() -> list[IdentityRow]:
    """The rows of the table."""
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(case, Path(folder)))
    return rows


def markdown(rows: list[IdentityRow]) -> str:
    """The page."""
    lines = [
        "# What runs again",
        "",
        "Made by `python -m benchmarks.identity`: do not edit. Of this graph,",
        "",
        *PICTURE.splitlines(),
        "",
        "these stages run again after an input from outside has changed. Everything else is taken from the store.",
        "",
        "| outside input | one byte changed | `touch` | the same bytes elsewhere |",
        "|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.title, *(_cell(stages) for stages in (row.changed, row.touched, row.copied))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(stages: list[str] | None) -> str:
    return "–" if stages is None else ", ".join(stages) or "none"


def _make(folder: Path) -> None:
    files = {
        "chats.jsonl": b'{"prompt": "hi", "completion": "hello"}\n',
        "chats.parquet": b"PAR1 made up PAR1",
        "chats/data/part-1.jsonl": b'{"prompt": "hi", "completion": "hello"}\n',
        "others.jsonl": b'{"prompt": "a", "completion": "b"}\n',
        "pairs.jsonl": b'{"prompt": "hi", "chosen": "hello", "rejected": "no"}\n',
        "model/config.json": b"{}",
        "model/model.safetensors": bytes(64),
        "gguf/model.gguf": b"GGUF" + bytes(64),
        "gguf/tokenizer.json": b"{}",
    } | {f"code/{PACKAGE}/{name}": text.encode() for name, text in MODULES.items()}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _inputs(directory: Path) -> dict[str, str]:
    return {
        "source": str(directory / "chats.jsonl"),
        "model": str(directory / "model"),
        "path": str(directory / "pairs.jsonl"),
        "function": f"{PACKAGE}.rewards:polite",
        "gold": f"{PACKAGE}.gold:score",
        "other": str(directory / "others.jsonl"),
    }


def _value(case: OutsideInput, directory: Path) -> dict[str, str]:
    return {case.field: case.value or str(directory / str(case.path))}


@contextlib.contextmanager
def _imports_from(directory: Path) -> Iterator[None]:
    """Functions are found in `directory`; none is imported."""
    importlib.invalidate_caches()
    with patch.object(sys, "path", [str(directory), *sys.path]), patch.dict(os.environ, {VARIABLE: f"{PACKAGE}.*"}):
        yield


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TABLE
    target.write_text(markdown(measure_all()), encoding="utf-8")
    print(f"written: {target}")
