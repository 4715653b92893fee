"""Cycles on real engines: what people said becomes a candidate, by each way of training, and is promoted."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, environment, xray
from tests.e2e.cycles import ASKED, NAME, WAYS, word
from xray.flows.cycles import read_cycles
from xray_runtime.kernel.history.reference import open_lineage_store, resolve

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory after a cycle for each way."""
    output = tmp_path_factory.mktemp("cycles") / "run"
    command = [sys.executable, "-m", "tests.e2e.cycles", str(output)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return output


@pytest.mark.parametrize("way", WAYS)
def test_a_cycle_makes_a_candidate(way: str, place: Path) -> None:
    cycle = read_cycles(place)[list(WAYS).index(way)]
    assert (cycle.state, cycle.reasons) == ("candidate", [])
    assert set(cycle.gates) == {"fixed", "recorded"}
    assert cycle.policy is not None
    graph = open_lineage_store(place, None).graph
    parents = {role: graph.nodes[sha] for role, sha in graph.parents(cycle.policy)}
    assert (graph.nodes[cycle.policy].manifest.kind, parents["policy"].sha256) == (way, cycle.start)
    assert ("rewards.0" in parents and parents["rewards.0"].manifest.kind == "reward_model") == (way == "ppo")
    # It learned from what was said in this cycle, and in those before.
    assert set(cycle.feedback) <= set(graph.ancestors([cycle.policy]))
    assert len(cycle.feedback) == cycle.number


def test_the_last_candidate_is_champion_and_everything_is_sound(place: Path) -> None:
    audited = xray("audit", "--all", "--output", str(place))
    assert audited.code == 0, audited.out
    assert resolve(f"{NAME}@champion", place, None)[1].sha256 == read_cycles(place)[-1].policy


def contents(root: Path) -> Iterator[tuple[str, bytes]]:
    """(path, its bytes, and all values if it is a database) of every file below a directory."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if content.startswith(b"SQLite format 3\0"):
                with closing(sqlite3.connect(path)) as database:
                    content += "\n".join(database.iterdump()).encode("utf-8", "surrogatepass")
            yield path.relative_to(root).as_posix(), content


def test_prefect_never_has_a_text(place: Path) -> None:
    """Its server, and what it keeps, may be elsewhere, where no withdrawal reaches."""
    found = {word: [name for name, content in contents(place) if word in content] for word in (b"quokka", b"wombat")}
    # They would be found if they were there.
    assert any(name.startswith("checkpoints/curate-") for name in found[b"quokka"])
    assert any(name.startswith("checkpoints/evaluate-") for name in found[b"wombat"])
    database = dict(contents(place))["prefect/prefect.db"]
    assert b"Ada promoted it" in database
    assert [name for names in found.values() for name in names if name.startswith("prefect/")] == []


def test_withdrawn_texts_are_found_nowhere(place: Path) -> None:
    withdrawn = xray("withdraw", "--output", str(place), "--user", "person 3", "--yes")
    assert withdrawn.code == 0, withdrawn.out + withdrawn.err
    theirs = [word(3, number, cycle).encode() for number in range(ASKED) for cycle in range(1, len(WAYS) + 1)]
    assert [name for name, content in contents(place) if any(text in content for text in theirs)] == []
