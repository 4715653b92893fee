"""Twice as many checkpoints take about twice the work: an audit that reads no weights, and a drawing of 800.

Work is processor time. Four times as many checkpoints are four times the work, sixteen times if it were quadratic; the
limit is half-way. Calls are not counted: CPython 3.11 can loop without end in `sys.setprofile`.
XRAY_AUDIT_CHECKPOINTS=5000 audits as many, signed one by one (minutes to make them), and prints the seconds.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from tests.unit.trust.synthetic import Lifecycle
from xray_runtime.kernel.history.graph import CheckpointGraph, Node, read_graph
from xray_runtime.kernel.history.reference import LineageStore, open_lineage_store
from xray_runtime.kernel.history.render import lineage_text, selection
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.page import write_html

T = TypeVar("T")
LIMIT = 8


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Node:
    output = tmp_path_factory.mktemp("scale")
    Lifecycle(output, tracking=False).add("base", "base", {"x": b""}, {})
    return next(iter(read_graph(output / "checkpoints").nodes.values()))


def processor_seconds(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and its seconds in all threads: the shorter of two."""
    seconds = []
    for _ in range(2):
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
    return result, min(seconds)


def stored(output: Path, count: int) -> LineageStore:
    """A chain of real checkpoints on disk, each with two more parents of any age."""
    rng, lifecycle = random.Random(0), Lifecycle(output, tracking=False)
    for i in range(count):
        ages = {"policy": i - 1, "reference": rng.randrange(i), "reward": rng.randrange(i)} if i else {}
        older = {role: f"s{age}" for role, age in ages.items()}
        lifecycle.add(f"s{i}", "ppo", {"x": str(i).encode()}, older)
    return open_lineage_store(output, None)


def test_an_audit_without_reading_grows_linearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xray_runtime.kernel.store.checkpoints.sync", lambda path: None)
    large = int(os.environ.get("XRAY_AUDIT_CHECKPOINTS", "100"))
    work = []
    for count in (large // 4, large):
        place = stored(tmp_path / str(count), count)
        result, seconds = processor_seconds(partial(audit, place, hashing=False))
        print(f"{count} checkpoints: {seconds:.1f} s")
        work.append(seconds)
        assert result.is_sound
        assert result.checkpoints == count
    assert work[1] < LIMIT * work[0]


def lineage(one: Node, count: int) -> tuple[CheckpointGraph, Node]:
    """A chain in which each also has two ancestors of any age."""
    rng, graph = random.Random(0), CheckpointGraph()
    for i in range(count):
        older = {"reward": rng.randrange(i), "reference": rng.randrange(i), "policy": i - 1} if i else {}
        parents = {role: f"{parent:064x}" for role, parent in older.items()}
        manifest = one.manifest.model_copy(update={"stage": f"s{i}", "parents": parents})
        node = Node(f"{i:064x}", one.directory, manifest)
        graph.add(node)
    return graph, node


def test_drawing_thousands_grows_linearly(one: Node, tmp_path: Path) -> None:
    def draw(count: int) -> tuple[int, int]:
        graph, last = lineage(one, count)
        text = "\n".join(lineage_text(graph, last, descendants=True))
        write_html(tmp_path / "page.html", LineageStore(tmp_path, graph, None), last, selection(graph, last, True))
        return len(text), (tmp_path / "page.html").stat().st_size

    (small, few), (large, many) = processor_seconds(lambda: draw(200)), processor_seconds(lambda: draw(800))
    assert many < LIMIT * few
    for a, b in zip(small, large, strict=True):
        assert b < 5 * a
