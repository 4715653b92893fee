"""A tiny Llama in float64, for comparisons to the last digits, and a copy of X-ray's package to edit."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xray_runtime.models.config import FreshBase

# xdist's controller imports this file and runs no test, and its workers start after that: libraries wait for fixtures.
if TYPE_CHECKING:
    from torch import Tensor

    from xray_runtime.kernel.store.seal import Seal

TINY = FreshBase(
    vocab_size=300, hidden_size=32, num_layers=3, num_heads=1, num_kv_heads=1, intermediate_size=48, max_positions=64
)

ROOT = Path(__file__).parents[2]

Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(prompt ids, reply ids) of each row."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Models this small only lose by a second thread, and seconds where cores are shared."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def torch_threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of torch's threads until the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks() -> Iterator[None]:
    """No unit test cuts the power, and most of the time of a test with a store goes into waiting for the disk."""
    from sqlalchemy import Engine, event

    def connected(connection: Any, _: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("pragma synchronous = off")

    event.listen(Engine, "connect", connected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield
    event.remove(Engine, "connect", connected)


@pytest.fixture(scope="session", autouse=True)
def _no_files_in_the_users_memory() -> Iterator[None]:
    """Each digest of a file of a test would else rewrite what this user's other processes know of their files."""
    from xray_runtime.kernel.store import module_graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_graph, "keep_syntax", lambda: None)
        yield


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    from xray_runtime.data.tokenizing import train_tokenizer

    return train_tokenizer(["hello there", "how are you today"] * 5, TINY.vocab_size)


@pytest.fixture(scope="session")
def make_lm(tiny_tokenizer: Any) -> Callable[[int], Any]:
    """Seed → a new Llama of three layers."""
    import torch

    from xray_runtime.models.causal_lm import fresh_llama

    def make(seed: int) -> Any:
        lm = fresh_llama(TINY, tiny_tokenizer, seed).double()
        with torch.no_grad():
            # As they are drawn the weights are so small that attention hardly matters, and a wrong mask hardly shows.
            for parameter in lm.parameters():
                parameter *= 10.0 if parameter.dim() > 1 else 1.0
        return lm

    return make


@pytest.fixture(scope="session")
def as_rows() -> Callable[..., dict[str, Tensor]]:
    """Pairs → rows as objectives read them."""
    import torch

    def make(pairs: Pairs) -> dict[str, Tensor]:
        return {
            "input_ids": torch.tensor([token for prompt, reply in pairs for token in (*prompt, *reply)]),
            "prompt_lengths": torch.tensor([len(p) for p, _ in pairs]),
            "lengths": torch.tensor([len(p) + len(r) for p, r in pairs]),
        }

    return make


@pytest.fixture
def intruder() -> Seal:
    """The seal of somebody who does not have the run's key."""
    from xray_runtime.kernel.store.seal import process_seal

    made: Seal = process_seal.__wrapped__()
    return made


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """X-ray's own package under another name, to be edited."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "xray_runtime", folder / "xray_copied", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / "xray_copied").rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8").replace("xray_runtime", "xray_copied"), encoding="utf-8")
    return folder
