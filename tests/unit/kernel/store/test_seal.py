"""A seal holds for one content, one purpose and one key."""

from __future__ import annotations

from pathlib import Path

from xray_runtime.kernel.store.seal import Seal, process_seal
from xray_runtime.trust.keys import rotate, seal_of


def test_a_seal_is_for_one_content_and_one_purpose() -> None:
    seal = process_seal()
    text = seal.sign("snapshots/sft-1/step-1", b"content")
    assert seal.holds("snapshots/sft-1/step-1", b"content", text)
    assert not seal.holds("snapshots/sft-1/step-2", b"content", text)
    assert not seal.holds("snapshots/sft-1/step-1", b"other", text)
    edited = (text[:-4], text.replace("A", "B"), text + "A")
    for wrong in (*edited, "", "{}", "[" * 9999, "\udcff", "é" * 96, None, 5, {"a": 1}):
        assert not seal.holds("snapshots/sft-1/step-1", b"content", wrong)


def test_a_file_is_sealed_under_its_name(tmp_path: Path) -> None:
    seal, path = process_seal(), tmp_path / "a" / "file"
    path.parent.mkdir()
    path.write_text("content")
    assert not seal.is_sealed(path)
    seal.seal_file(path)
    assert seal.is_sealed(path)
    path.write_text("other")
    assert not seal.is_sealed(path)
    path.write_text("content")
    moved = path.rename(tmp_path / "a" / "moved")
    path.with_name("file.seal").rename(path.with_name("moved.seal"))
    assert not seal.is_sealed(moved)
    assert not seal.is_sealed(tmp_path)


def test_a_directory_has_one_seal_and_a_retired_key_counts_no_longer(tmp_path: Path) -> None:
    first = seal_of(tmp_path / "a")
    text = first.sign("p", b"ab")
    assert seal_of(tmp_path / "a").holds("p", b"ab", text)
    assert not seal_of(tmp_path / "b").holds("p", b"ab", text)
    rotate(tmp_path / "a", by="me", note="")
    after = seal_of(tmp_path / "a")
    assert not after.holds("p", b"ab", text)
    assert after.holds("p", b"ab", after.sign("p", b"ab"))


def test_who_has_no_private_key_still_checks(tmp_path: Path) -> None:
    text = seal_of(tmp_path).sign("p", b"ab")
    assert Seal(None, [(tmp_path / "keys" / "signing.pub").read_bytes()]).holds("p", b"ab", text)
