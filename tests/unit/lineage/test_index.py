"""`xray lineage` of one checkpoint reads what is behind it, and shows what is there whatever the index says."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.lineage.synthetic import NAME, Lifecycle
from xray_runtime.config.validation import ConfigError
from xray_runtime.lineage import graph, index
from xray_runtime.lineage.index import INDEX
from xray_runtime.lineage.reference import resolve, resolve_history
from xray_runtime.lineage.render import lineage_json, lineage_text


def shown(reference: str, output: Path) -> tuple[list[str], object]:
    store, node = resolve_history(reference, output, None)
    return list(lineage_text(store.graph, node, False)), lineage_json(store.graph, node, False)


def expected(reference: str, output: Path) -> tuple[list[str], object]:
    store, node = resolve(reference, output, None)
    return list(lineage_text(store.graph, node, False)), lineage_json(store.graph, node, False)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories whose manifests were read."""
    found: list[Path] = []
    for module in (graph, index):
        real = module.read_manifest
        monkeypatch.setattr(module, "read_manifest", lambda path, real=real: (found.append(path), real(path))[1])
    return found


def test_what_is_behind_a_checkpoint_is_read_alone(tmp_path: Path, read: list[Path]) -> None:
    lifecycle = Lifecycle(tmp_path, tracking=False)
    lifecycle.add("base", "base", {"x": b""}, {})
    for number in range(40):
        lifecycle.add(f"s{number}", "ppo", {"x": str(number).encode()}, {"policy": "base"})
    for reference in (lifecycle.done["s7"].sha256, "s7", lifecycle.done["s7"].sha256[:10], lifecycle.done["s7"].uri):
        same = expected(reference, tmp_path)
        read.clear()
        assert shown(reference, tmp_path) == same
        # The first makes the index.
        assert len(read) == 2 or reference == lifecycle.done["s7"].sha256
    lifecycle.add("new", "ppo", {"x": b"new"}, {"policy": "s7"})
    read.clear()
    assert len(shown("new", tmp_path)[0]) == 3
    assert len(read) == 4
    with pytest.raises(ConfigError, match="matches nothing"):
        resolve_history("nothing", tmp_path, None)


def _sql(statement: str) -> Callable[[Path], object]:
    def change(output: Path) -> None:
        with sqlite3.connect(output / INDEX) as database:
            database.execute(statement)
        database.close()

    return change


def _outside(output: Path) -> None:
    shutil.copytree(next(output.glob("checkpoints/sft-*")), output / "outside")
    _sql("UPDATE checkpoints SET name = '../outside' WHERE stage = 'sft'")(output)


def _link(output: Path) -> None:
    shutil.move(output / INDEX, output / "elsewhere")
    (output / INDEX).symlink_to(output / "elsewhere")


WRONG: dict[str, Callable[[Path], object]] = {
    "gone": lambda output: (output / INDEX).unlink(),
    "no database": lambda output: (output / INDEX).write_bytes(b"none" * 1000),
    "a link": _link,
    "another table": _sql("ALTER TABLE checkpoints RENAME sha256 TO other"),
    "less": _sql("DELETE FROM checkpoints WHERE stage = 'sft'"),
    "another's digest": _sql("UPDATE checkpoints SET sha256 = (SELECT sha256 FROM checkpoints WHERE stage = 'base')"),
    "another's name": _sql(
        "UPDATE checkpoints SET sha256 = CASE stage WHEN 'sft' THEN (SELECT sha256 FROM checkpoints WHERE "
        "stage = 'reward') ELSE sha256 END WHERE stage != 'reward'"
    ),
    "one outside": _outside,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_index_shows_nothing_wrong(wrong: str, fresh: Callable[[], Path]) -> None:
    output = fresh()
    same = expected("ppo-2", output)
    assert shown("ppo-2", output) == same
    WRONG[wrong](output)
    assert shown("ppo-2", output) == same
    assert shown(f"{NAME}@candidate", output) == same


def test_what_was_computed_again_or_removed_is_shown_as_it_is(fresh: Callable[[], Path]) -> None:
    output = fresh()
    shown("ppo-2", output)
    shutil.rmtree(next(output.glob("checkpoints/base-*")))
    assert shown("ppo-2", output) == expected("ppo-2", output)
    manifest = next(output.glob("checkpoints/sft-*/manifest.json"))
    manifest.write_text(manifest.read_text() + " ")
    assert shown("ppo-2", output) == expected("ppo-2", output)
    assert "(not in the store)" in "".join(shown("ppo-2", output)[0])
