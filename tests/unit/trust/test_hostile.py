"""Whatever lies in a store: a finding, never a crash, a hang, or a read outside of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sweeps import sweep
from tests.unit.trust.tampering import checkpoints
from xray_runtime.kernel.history.graph import CheckpointGraph, Node
from xray_runtime.kernel.history.reference import LineageStore, open_lineage_store
from xray_runtime.kernel.history.render import lineage_text, selection
from xray_runtime.kernel.store.manifest import ATTESTATION, MANIFEST, SIGNATURE, Manifest
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.page import write_html

opened: list[str] | None = None


def _health(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and opened is not None:
        opened.append(os.path.realpath(arguments[0]) if isinstance(arguments[0], str | os.PathLike) else "")


sys.addaudithook(_health)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory nobody may open a file in."""
    global opened
    path = tmp_path / "outside"
    path.mkdir()
    for name in ("secret", MANIFEST, "train.arrow", "statement.json"):
        (path / name).write_text("{}")
    looked_at = opened = []
    yield path
    looked_at, opened = opened, None
    assert not [name for name in looked_at if str(path) in name]


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def entry(path: str) -> dict[str, object]:
    return {"path": path, "sha256": "0" * 64, "size": 2}


def found(output: Path) -> set[str]:
    return {finding.code for finding in audit(open_lineage_store(output, None)).findings}


@pytest.mark.parametrize(
    "name", ["../../../outside/secret", "{outside}/secret", "a/../../../../outside/secret", "", "a\0b"]
)
def test_names_that_leave_the_checkpoint(name: str, bare: Path, outside: Path) -> None:
    name = name.replace("{outside}", str(outside))
    rewrite(checkpoints(bare)[0] / MANIFEST, lambda m: m["files"].append(entry(name)))
    assert "unsafe-path" in found(bare)


def _replace_by_link(path: Path, target: Path) -> None:
    if path.is_dir():
        path.rename(path.parent.parent.parent / f"aside-{path.name}")
    else:
        path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("", "manifest-malformed"),
        (MANIFEST, "manifest-malformed"),
        ("train.arrow", "file-link"),
        (ATTESTATION, "statement-missing"),
        (f"{ATTESTATION}/statement.json", "file-added"),
    ],
)
def test_links_are_not_followed(what: str, code: str, bare: Path, outside: Path) -> None:
    prepare = next(path for path in checkpoints(bare) if path.name.startswith("prepare"))
    path = prepare / what if what else prepare
    _replace_by_link(path, outside / path.name if path.suffix in (".json", ".arrow") else outside)
    assert code in found(bare)


def test_links_among_the_other_records_are_not_followed(bare: Path, outside: Path) -> None:
    _replace_by_link(bare / "lifecycle.json", outside / "secret")
    _replace_by_link(bare / "keys" / "signing.pub", outside / "secret")
    for card in bare.glob("checkpoints/*/README.md"):
        _replace_by_link(card, outside / "secret")
    assert {"record-malformed", "key-missing", "card-missing"} <= found(bare)


def test_a_link_to_nothing_in_the_place_of_a_card_is_found(bare: Path, tmp_path: Path) -> None:
    prepare = next(path for path in checkpoints(bare) if path.name.startswith("prepare"))
    # A dataset has no card.
    (prepare / "README.md").symlink_to(tmp_path / "nothing")
    assert "card-missing" in found(bare)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


BAD_FILES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "no JSON": lambda path: path.write_text('{"files": ['),
    "a list": lambda path: path.write_text("[]"),
    "null": lambda path: path.write_text("null"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "not UTF-8": lambda path: path.write_bytes(b'{"stage": "\xff\xfe"}'),
    "huge": lambda path: path.write_text('{"x": "' + "x" * 17 * 2**20 + '"}'),
    "a huge number": lambda path: path.write_text('{"seed": ' + "9" * 5000 + "}"),
    "a pipe": _fifo,
    "gone": lambda path: path.unlink(),
}


FILES = {
    f"checkpoints/ppo-2-*/{MANIFEST}": "manifest-malformed",
    f"checkpoints/ppo-2-*/{ATTESTATION}/statement.json": "statement-|signature-|file-added",
    f"checkpoints/ppo-2-*/{SIGNATURE}": "signature-",
    "checkpoints/prepare-*/train.arrow": "file-",
    "checkpoints/evaluate-*/prompts.json": "evaluation-inconsistent",
    "checkpoints/ppo-2-*/README.md": "card-",
    "lifecycle.json": "record-malformed|run-changed",
    "log.jsonl": "log-",
    "keys/signing.pub": "key-missing",
    "mlflow.db": "tracking-",
}
"""File → codes of findings, one of which damaging it must bring."""


@pytest.mark.parametrize(("pattern", "damage"), sweep(list(FILES), list(BAD_FILES)))
def test_malformed_files(pattern: str, damage: str, bare: Path, fresh: Callable[[], Path]) -> None:
    output = fresh() if pattern == "mlflow.db" else bare
    BAD_FILES[damage](next(iter(output.glob(pattern))))
    codes = found(output)
    assert any(c.startswith(option) for c in codes for option in FILES[pattern].split("|")), codes


def test_names_that_would_write_to_the_terminal_or_the_page(bare: Path, tmp_path: Path) -> None:
    place = open_lineage_store(bare, None)
    first = next(iter(place.graph.nodes.values()))
    hostile = first.manifest.model_copy(update={"stage": "\x1b[2J[red]<script>alert(1)</script>", "parents": {}})
    node = Node("f" * 64, first.directory, hostile)
    place.graph.add(node)
    text = "".join(lineage_text(place.graph, node, True))
    assert "\x1b" not in text
    write_html(tmp_path / "page.html", place, node, selection(place.graph, node, True))
    assert "<script" not in (tmp_path / "page.html").read_text()


def test_a_cycle_ends_and_is_named(bare: Path, tmp_path: Path) -> None:
    some: Manifest = next(iter(open_lineage_store(bare, None).graph.nodes.values())).manifest
    graph = CheckpointGraph()
    shas = [f"{i:064x}" for i in range(3)]
    for i, sha in enumerate(shas):
        manifest = some.model_copy(update={"stage": f"s{i}", "parents": {"policy": shas[(i + 1) % 3], "itself": sha}})
        graph.add(Node(sha, bare / "checkpoints" / f"s{i}", manifest))
    place = LineageStore(bare, graph, None)
    node = graph.nodes[shas[0]]
    assert len(list(lineage_text(graph, node, True))) > 3
    write_html(tmp_path / "page.html", place, node, selection(place.graph, node, True))
    assert "cycle" in {finding.code for finding in audit(place, [node]).findings}
