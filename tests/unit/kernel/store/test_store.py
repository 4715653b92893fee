"""The checkpoint store: whole or not at all, and every damage named."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.kernel.store.published import KEY, publish
from xray_runtime.kernel.store.checkpoints import Store, load_manifest, read_bounded, verify
from xray_runtime.kernel.store.digest_memory import DigestMemory, FileState
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import MANIFEST


def test_equal_builds_have_equal_digests_wherever_they_are(tmp_path: Path) -> None:
    first, second = publish(tmp_path / "a"), publish(tmp_path / "b")
    assert first.sha256 == second.sha256
    assert verify(first.path, first.sha256) == []
    assert [e.path for e in load_manifest(first.path).files] == ["head/h.bin", "model.bin"]
    assert str(tmp_path) not in (first.path / MANIFEST).read_text()


def test_other_bytes_have_another_digest(tmp_path: Path) -> None:
    assert publish(tmp_path / "a").sha256 != publish(tmp_path / "b", b"weighty").sha256


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda d: flip(d / "model.bin"), "model.bin was changed"),
        (lambda d: (d / "model.bin").unlink(), "model.bin is missing"),
        (lambda d: (d / "extra.bin").write_bytes(b"x"), "extra.bin was added"),
        (lambda d: (d / "model.bin").write_bytes(b"more than before"), "model.bin has 16 bytes, not 7"),
        (lambda d: (d / MANIFEST).write_text("{"), "damaged or not a manifest"),
        (lambda d: (d / MANIFEST).unlink(), "No such file"),
        (
            lambda d: (d / MANIFEST).write_text((d / MANIFEST).read_text().replace('"step": 3', '"step": 4')),
            "not the one",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, damage, finding: str) -> None:
    ref = publish(tmp_path)
    damage(ref.path)
    assert any(finding in f for f in verify(ref.path, ref.sha256))


def test_a_link_is_not_a_file(tmp_path: Path) -> None:
    ref = publish(tmp_path)
    (tmp_path / "elsewhere").write_bytes(b"weights")
    (ref.path / "model.bin").unlink()
    (ref.path / "model.bin").symlink_to(tmp_path / "elsewhere")
    assert verify(ref.path) == ["model.bin is a link"]


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "a/../../b", "", "a//b"])
def test_paths_that_leave_the_checkpoint_are_refused(tmp_path: Path, path: str) -> None:
    ref = publish(tmp_path)
    manifest = load_manifest(ref.path)
    entry = manifest.files[0].model_copy(update={"path": path})
    (ref.path / MANIFEST).write_bytes(manifest.model_copy(update={"files": [entry]}).to_bytes())
    assert any("unsafe path" in finding for finding in verify(ref.path))


def test_a_sound_checkpoint_stays_and_a_damaged_one_is_kept_aside(tmp_path: Path) -> None:
    ref = publish(tmp_path)
    before = (ref.path / "model.bin").stat().st_ino
    assert publish(tmp_path, b"other") == ref
    assert (ref.path / "model.bin").stat().st_ino == before
    flip(ref.path / "model.bin")
    again = publish(tmp_path)
    assert again == ref
    assert verify(again.path, again.sha256) == []
    assert ref.path.with_name(ref.path.name + ".damaged-1").is_dir()


def test_damaged_directories_are_kept(tmp_path: Path) -> None:
    ref = publish(tmp_path)
    for content in (b"first", b"second"):
        (ref.path / "model.bin").write_bytes(content)
        publish(tmp_path)
    kept = [ref.path.with_name(f"{ref.path.name}.damaged-{number}") / "model.bin" for number in (1, 2)]
    assert [path.read_bytes() for path in kept] == [b"first", b"second"]


def test_a_name_is_not_enough_to_be_found(tmp_path: Path) -> None:
    """A directory is named by the first digits of its key."""
    ref, store = publish(tmp_path), Store(tmp_path)
    assert store.find("sft", KEY) == ref
    assert store.find("sft", KEY[:12] + "0" * 52) is None
    assert store.find("dpo", KEY) is None
    flip(ref.path / "model.bin")
    assert store.find("sft", KEY) is None


def test_a_file_found_sound_is_not_read_again(tmp_path: Path, memory: DigestMemory, reads: list[str]) -> None:
    """Nor by another process, which has a store of its own on the same memory."""
    root = tmp_path / "checkpoints"
    ref = publish(root)
    reads.clear()
    assert [Store(root, memory=memory).find("sft", KEY) for _ in range(3)] == [ref] * 3
    assert sorted(reads) == ["h.bin", "model.bin"]
    assert verify(ref.path) == []
    assert sorted(reads) == ["h.bin", "h.bin", "model.bin", "model.bin"]


def test_an_edit_with_its_time_set_back_is_found(tmp_path: Path, memory: DigestMemory) -> None:
    """In place and of the same size: path, size, inode and modification time are as before."""
    root = tmp_path / "checkpoints"
    ref, store = publish(root), Store(root, memory=memory)
    assert store.find("sft", KEY) == ref
    path = ref.path / "model.bin"
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"W")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_ino, after.st_mtime_ns) == (before.st_size, before.st_ino, before.st_mtime_ns)
    assert store.find("sft", KEY) is None


def test_a_forged_memory_deceives_find_alone(tmp_path: Path, memory: DigestMemory) -> None:
    """Anybody who can write the memory can make `find` accept other bytes; checks that read every byte still fail."""
    root = tmp_path / "checkpoints"
    ref, store = publish(root), Store(root, memory=memory)
    path = ref.path / "model.bin"
    sha256 = file_sha256(path)
    flip(path)
    memory.remember([(FileState.of(path), sha256)])
    assert store.find("sft", KEY) == ref
    assert verify(ref.path, ref.sha256) == ["model.bin was changed"]
    publish(root, memory=memory)
    assert verify(ref.path, ref.sha256) == []


def test_another_build_of_the_same_key_is_left_alone(tmp_path: Path) -> None:
    with Store(tmp_path).building("sft", KEY) as first:
        (first / "half").write_bytes(b"x")
        ref = publish(tmp_path)
        assert (first / "half").read_bytes() == b"x"
    assert list(tmp_path.iterdir()) == [ref.path]


def test_only_stray_files_at_the_top_are_ignored(tmp_path: Path) -> None:
    ref = publish(tmp_path)
    for name in ("README.md", "model.sig", "attestation/statement.json", "attestation/deep/x"):
        (ref.path / name).parent.mkdir(exist_ok=True)
        (ref.path / name).write_text("x")
    assert verify(ref.path, ref.sha256) == []
    for name in ("head/README.md", "head/attestation/x", "head/deep/attestation/x"):
        (ref.path / name).parent.mkdir(exist_ok=True, parents=True)
        (ref.path / name).write_text("x")
        assert verify(ref.path) == [f"{name} was added"]
        (ref.path / name).unlink()
    shutil.rmtree(ref.path / "attestation")
    (ref.path / "attestation").symlink_to(tmp_path)
    assert verify(ref.path) == ["attestation was added"]


def test_a_record_is_read_up_to_its_bound_and_no_link_or_pipe_is(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for name, limit in (("record", 4), ("link", 5), ("pipe", 5)):
        with pytest.raises(ValueError, match=f"{name}: a link, not a file, or larger than {limit} bytes"):
            read_bounded(tmp_path / name, limit)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build() -> None:
        with Store(tmp_path).building("sft", KEY) as built:
            (built / "half").write_bytes(b"x")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        build()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_build_publishes_nothing_and_is_swept(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from xray_runtime.kernel.store.checkpoints import Store\n"
        f"with Store(Path(sys.argv[1])).building('sft', '{KEY}') as built:\n"
        "    (built / 'half').write_bytes(b'x'); print('ready', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not Store(tmp_path).directory("sft", KEY).exists()
    assert len(list(tmp_path.iterdir())) == 1
    publish(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [f"sft-{KEY[:12]}"]
