"""What stages keep, in an audit: everything sealed is sound, everything planted or edited is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from xray_runtime.kernel.store.derived import Derived
from xray_runtime.kernel.store.snapshots import Snapshots
from xray_runtime.rewards.journal import ANSWERS, Journal
from xray_runtime.rewards.source import Score
from xray_runtime.trust.audit.checks.files import check_kept
from xray_runtime.trust.keys import rotate, seal_of, trusted_keys

TOKENS, STAGE = "checkpoints/prepare-1.tokens-", "snapshots/ppo-1"
SNAPSHOT = f"{STAGE}/step-0000000003"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    seal = seal_of(tmp_path)
    derived = Derived(tmp_path / "checkpoints" / "prepare-1", seal)
    derived.make("a.arrow", lambda path: path.write_bytes(b"tokens") and None)
    derived.make("b.states", lambda path: path.write_bytes(b"states") and None)
    with Snapshots(tmp_path / STAGE, 1, seal).writing(3, {}) as directory:
        (directory / "part").write_bytes(b"weights")
    Journal(tmp_path / STAGE, seal=seal).write("judge", 0, [("k", Score(0.5)), ("l", Score(0.25))])
    return tmp_path


def found(output: Path) -> list[str]:
    findings = list(check_kept(output, [key.pem for key in trusted_keys(output)], hashing=True))
    assert all(finding.code == "kept-unsealed" and finding.is_broken for finding in findings)
    return [finding.subject for finding in findings]


def test_kept_files_are_sound_after_a_kill_and_a_new_key(output: Path) -> None:
    (output / TOKENS / "c.arrow.seal.writing-12345678").write_bytes(b"")
    (output / TOKENS / "c.arrow.building").mkdir()
    with (output / STAGE / ANSWERS).open("ab") as file:
        file.write(b'{"key": "cut sho')
    assert found(output) == []
    rotate(output, by="me", note="")
    assert found(output) == []


def _swap(output: Path) -> None:
    for ending in ("", ".seal"):
        shutil.copyfile(output / TOKENS / f"a.arrow{ending}", output / TOKENS / f"b.states{ending}")


def _link(output: Path) -> None:
    (output / TOKENS / "a.arrow").unlink()
    (output / TOKENS / "a.arrow").symlink_to(output / TOKENS / "b.states")


def _edit(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    return lambda output: (output / name).write_bytes((output / name).read_bytes().replace(old, new)) and None


TAMPERINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "edited tokens": (_edit(f"{TOKENS}/a.arrow", b"tok", b"TOK"), f"{TOKENS}/a.arrow"),
    "tokens for states": (_swap, f"{TOKENS}/b.states"),
    "tokens that are a link": (_link, f"{TOKENS}/a.arrow"),
    "new tokens": (lambda output: (output / TOKENS / "d.arrow").write_bytes(b"poison"), f"{TOKENS}/d.arrow"),
    "no seal": (lambda output: (output / TOKENS / "a.arrow.seal").unlink(), f"{TOKENS}/a.arrow"),
    "edited weights": (_edit(f"{SNAPSHOT}/part", b"wei", b"WEI"), SNAPSHOT),
    "edited list": (_edit(f"{SNAPSHOT}/files.json", b"0", b"1"), SNAPSHOT),
    "added to a snapshot": (lambda output: (output / SNAPSHOT / "more").touch(), SNAPSHOT),
    "left out of a snapshot": (lambda output: (output / SNAPSHOT / "part").unlink(), SNAPSHOT),
    "renamed snapshot": (lambda output: (output / SNAPSHOT).rename(output / STAGE / "step-0000000009"), STAGE),
    "edited answer": (_edit(f"{STAGE}/{ANSWERS}", b"0.5", b"0.9"), f"{STAGE}/{ANSWERS}"),
    "answers of another stage": (
        lambda output: (output / STAGE).rename(output / "snapshots" / "ppo-2"),
        "snapshots/ppo-2",
    ),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_planted_and_edited_files_are_named(name: str, output: Path) -> None:
    tamper, where = TAMPERINGS[name]
    tamper(output)
    subjects = found(output)
    assert subjects
    assert all(subject.startswith(where) for subject in subjects)
