"""The chain of decisions: what a decision reads, whatever its index says, and when it is cut short."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from xray_runtime.lineage import decisions
from xray_runtime.lineage.decisions import FOLDER, INDEX, check_chain, current, decide
from xray_runtime.lineage.keys import trusted_keys
from xray_runtime.lineage.signing import Verifier, sign, signing_key


def register(output: Path, number: int, name: str = "policy") -> None:
    decide(output, signing_key(output), action="register", name=name, alias="candidate", version=str(number),
           checkpoint=f"{number:064x}")  # fmt: skip


def chain(output: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text())["predicate"] for path in sorted((output / FOLDER).glob("*.json"))]


def broken(output: Path) -> list[str]:
    return [finding.detail for finding in check_chain(output, Verifier(trusted_keys(output)))]


@pytest.fixture
def unsigned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signing is the slow part of a decision."""
    monkeypatch.setattr(decisions, "sign", lambda what, signature, private: signature.write_text("{}"))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often decisions were parsed and digested."""
    count = {"_read": 0, "file_sha256": 0, "_files": 0}

    def tally(name: str, real: Callable[..., Any], *arguments: Any) -> Any:
        count[name] += 1
        return real(*arguments)

    for name in count:
        monkeypatch.setattr(decisions, name, partial(tally, name, getattr(decisions, name)))
    return count


def test_a_decision_reads_what_came_since_the_one_before(
    tmp_path: Path, unsigned: None, counted: dict[str, int]
) -> None:
    for number in range(400):
        register(tmp_path, number, f"policy-{number % 3}")
    # Each decision parses the one before it, and the last about its alias; and digests two.
    assert counted["_read"] <= 2 * 400
    assert counted["file_sha256"] <= 2 * 400
    assert counted["_files"] <= 2
    assert len(chain(tmp_path)) == 400
    # The index is gone: the chain is read once, and all is as before.
    (tmp_path / FOLDER / INDEX).unlink()
    for name in counted:
        counted[name] = 0
    register(tmp_path, 400)
    register(tmp_path, 401)
    assert counted["_read"] <= 400 + 5
    assert list(check_chain(tmp_path, None)) == []


def test_the_same_registration_again_is_one_decision(tmp_path: Path, unsigned: None) -> None:
    for number, name in ((1, "a"), (1, "a"), (2, "b"), (1, "a"), (2, "a"), (1, "a")):
        register(tmp_path, number, name)
    assert [(d["name"], d["version"]) for d in chain(tmp_path)] == [("a", "1"), ("b", "2"), ("a", "2"), ("a", "1")]


def test_a_decision_keeps_what_it_was_made_of(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        **{"action": "promote", "name": "policy", "alias": "champion", "version": "3", "checkpoint": f"{3:064x}"},
        **{"by": "Ada", "note": "as agreed", "gates": [{"name": "max_kl", "passed": True, "reason": "KL 1.0"}]},
        **{"gates_from": "the defaults", "evidence": {"evaluation": f"{4:064x}"}},
    }
    decide(tmp_path, signing_key(tmp_path), **given)
    register(tmp_path, 4, "other")
    [first, second] = chain(tmp_path)
    assert {name: first[name] for name in given} == given
    assert first["previous"] == "0" * 64
    assert second["previous"] == hashlib.sha256((tmp_path / FOLDER / "000001.json").read_bytes()).hexdigest()
    subject = json.loads((tmp_path / FOLDER / "000001.json").read_text())["subject"]
    assert subject == [{"name": "policy/3", "digest": {"sha256": f"{3:064x}"}}]
    assert broken(tmp_path) == []
    assert current(tmp_path)["policy", "champion"].version == "3"


def _sql(*statements: str) -> Callable[[Path], object]:
    def change(index: Path) -> None:
        with sqlite3.connect(index) as database:
            for statement in statements:
                database.execute(statement)
        database.close()

    return change


def _link(index: Path) -> None:
    shutil.move(index, index.parent.parent / "elsewhere")
    index.symlink_to(index.parent.parent / "elsewhere")


WRONG: dict[str, Callable[[Path], object]] = {
    "gone": lambda index: index.unlink(),
    "no database": lambda index: index.write_bytes(b"no database of anybody's" * 100),
    "empty": lambda index: index.write_bytes(b""),
    "a link": _link,
    "other tables": _sql("DROP TABLE moves", "CREATE TABLE moves (x TEXT)"),
    "a shorter chain": _sql("UPDATE read SET number = 2"),
    "a longer chain": _sql("UPDATE read SET number = 9"),
    "another end": _sql(f"UPDATE read SET sha256 = '{'1' * 64}'"),
    "nothing read": _sql("DELETE FROM read"),
    "no moves": _sql("DELETE FROM moves"),
    "moves before": _sql("UPDATE moves SET number = 1"),
    "moves of another": _sql("UPDATE moves SET number = 2"),
    "moves of none": _sql("UPDATE moves SET number = 77"),
    "moves of nonsense": _sql("UPDATE moves SET number = 'x'"),
    "moves below zero": _sql("UPDATE moves SET number = -3"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_index_gives_no_wrong_decision(wrong: str, tmp_path: Path, unsigned: None) -> None:
    # The last one is read anew whatever the index says: what it may be wrong about lies before.
    for number, name in ((1, "a"), (2, "b"), (2, "a"), (3, "b")):
        register(tmp_path, number, name)
    WRONG[wrong](tmp_path / FOLDER / INDEX)
    # Version 1 was the candidate before version 2: to register it again is a decision.
    register(tmp_path, 1, "a")
    register(tmp_path, 1, "a")
    WRONG[wrong](tmp_path / FOLDER / INDEX)
    register(tmp_path, 5, "b")
    found = [(d["name"], d["version"]) for d in chain(tmp_path)]
    # Where the index knows no last decision about an alias, a registration may stand there twice.
    assert [pair for i, pair in enumerate(found) if i == 0 or found[i - 1] != pair] == [
        ("a", "1"), ("b", "2"), ("a", "2"), ("b", "3"), ("a", "1"), ("b", "5"),
    ]  # fmt: skip
    assert list(check_chain(tmp_path, None)) == []
    assert {pair: d.version for pair, d in current(tmp_path).items()} == {
        ("a", "candidate"): "1",
        ("b", "candidate"): "5",
    }


def test_an_index_of_an_older_chain_is_read_on(tmp_path: Path, unsigned: None) -> None:
    index = tmp_path / FOLDER / INDEX
    register(tmp_path, 1)
    register(tmp_path, 2)
    kept = index.read_bytes()
    register(tmp_path, 3)
    register(tmp_path, 4)
    index.write_bytes(kept)
    # As the index has it, version 2 was registered last.
    register(tmp_path, 2)
    assert [d["version"] for d in chain(tmp_path)] == ["1", "2", "3", "4", "2"]
    assert list(check_chain(tmp_path, None)) == []


def test_nothing_follows_a_chain_with_a_gap(tmp_path: Path, unsigned: None) -> None:
    for number in (1, 2, 3):
        register(tmp_path, number)
    (tmp_path / FOLDER / "000002.json").unlink()
    (tmp_path / FOLDER / INDEX).unlink()
    with pytest.raises(ValueError, match=r"000002\.json is missing"):
        register(tmp_path, 4)
    assert len(chain(tmp_path)) == 2


KILLED_AT = {
    "before the signature": (decisions, "sign", True),
    "after the signature": (decisions, "sign", False),
    "before the signature has its name": (os, "replace", True),
    "after the signature has its name": (os, "replace", False),
    "before the record has its name": (os, "link", True),
    "after the record has its name": (os, "link", False),
}


@pytest.mark.parametrize("moment", KILLED_AT)
def test_a_decision_that_is_killed_is_signed_or_not_there(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, before = KILLED_AT[moment]
    register(tmp_path, 1)
    child = os.fork()
    if child == 0:
        real = getattr(owner, name)

        def die(*arguments: Any) -> None:
            if not before:
                real(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, die)
        register(tmp_path, 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    there = 1 + (moment == "after the record has its name")
    assert len(chain(tmp_path)) == there
    assert broken(tmp_path) == []
    register(tmp_path, 2)
    register(tmp_path, 3)
    assert [d["version"] for d in chain(tmp_path)] == ["1", "2", "3"]
    assert broken(tmp_path) == []
    assert sorted(path.suffix for path in (tmp_path / FOLDER).glob("0*")) == [".json"] * 3 + [".sig"] * 3


def test_a_decision_that_was_changed_is_found_though_the_index_knew_it(tmp_path: Path) -> None:
    register(tmp_path, 1)
    register(tmp_path, 2)
    path = tmp_path / FOLDER / "000002.json"
    path.write_text(path.read_text().replace('"note": ""', '"note": "approved"'))
    register(tmp_path, 3)
    assert len(broken(tmp_path)) == 1
    sign(path, path.with_suffix(".sig"), signing_key(tmp_path))
    # Signed again by the key's owner it is theirs; the chain still says that another was there, had one followed it.
    assert broken(tmp_path) == []
