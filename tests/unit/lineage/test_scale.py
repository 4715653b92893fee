"""A lineage of 5,000 checkpoints draws in seconds, twice as many take about twice the room, and an audit that reads no
weights about twice the time.

XRAY_AUDIT_CHECKPOINTS=5000 audits as many, signed one by one (minutes to make them).
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.unit.lineage.synthetic import Lifecycle
from xray_runtime.lineage.audit import audit
from xray_runtime.lineage.drawing import lineage_text, write_html
from xray_runtime.lineage.graph import Graph, Node, read_graph
from xray_runtime.lineage.reference import Place, open_place


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Node:
    output = tmp_path_factory.mktemp("scale")
    Lifecycle(output, tracking=False).add("base", "base", {"x": b""}, {})
    return next(iter(read_graph(output / "checkpoints").nodes.values()))


def stored(output: Path, count: int) -> Place:
    """A chain of real checkpoints on disk, each with two more parents of any age."""
    rng, lifecycle = random.Random(0), Lifecycle(output, tracking=False)
    for i in range(count):
        ages = {"policy": i - 1, "reference": rng.randrange(i), "reward": rng.randrange(i)} if i else {}
        older = {role: f"s{age}" for role, age in ages.items()}
        lifecycle.add(f"s{i}", "ppo", {"x": str(i).encode()}, older)
    return open_place(output, None)


def test_an_audit_without_reading_grows_linearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xray_runtime.checkpoints.store.sync", lambda path: None)
    large = int(os.environ.get("XRAY_AUDIT_CHECKPOINTS", "160"))
    seconds = []
    for count in (large // 4, large):
        place = stored(tmp_path / str(count), count)
        start = time.process_time()
        result = audit(place, hashing=False)
        seconds.append(time.process_time() - start)
        assert result.is_sound
        assert result.checkpoints == count
    print(f"{large} checkpoints: {seconds[1]:.1f} s, {1000 * seconds[1] / large:.1f} ms each")
    # Four times as many would take sixteen times as long if it were quadratic.
    assert seconds[1] < 8 * seconds[0]
    assert seconds[1] < 0.02 * large


def lineage(one: Node, count: int) -> tuple[Graph, Node]:
    """A chain in which each also has two ancestors of any age."""
    rng, graph = random.Random(0), Graph()
    for i in range(count):
        older = {"reward": rng.randrange(i), "reference": rng.randrange(i), "policy": i - 1} if i else {}
        parents = {role: f"{parent:064x}" for role, parent in older.items()}
        manifest = one.manifest.model_copy(update={"stage": f"s{i}", "parents": parents})
        node = Node(f"{i:064x}", one.directory, manifest)
        graph.add(node)
    return graph, node


def test_thousands_draw_in_seconds(one: Node, tmp_path: Path) -> None:
    sizes = []
    for count in (2500, 5000):
        graph, last = lineage(one, count)
        start = time.process_time()
        text = "\n".join(lineage_text(graph, last, descendants=True))
        write_html(tmp_path / "page.html", Place(tmp_path, graph, None), last, descendants=True)
        assert time.process_time() - start < 20
        sizes.append((len(text), (tmp_path / "page.html").stat().st_size))
    for small, large in zip(*sizes, strict=True):
        assert large < 2.5 * small
