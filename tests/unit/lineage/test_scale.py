"""A lineage of 5,000 checkpoints draws in seconds, and twice as many take about twice the room."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.unit.lineage.synthetic import Lifecycle
from xray_runtime.lineage.drawing import lineage_text, write_html
from xray_runtime.lineage.graph import Graph, Node, read_graph
from xray_runtime.lineage.reference import Place


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Node:
    output = tmp_path_factory.mktemp("scale")
    Lifecycle(output, tracking=False).add("base", "base", {"x": b""}, {})
    return next(iter(read_graph(output / "checkpoints").nodes.values()))


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
