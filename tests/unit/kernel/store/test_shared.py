"""The shared store: whole or not there, every byte verified, patient with a server that is away."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.unit.kernel.store.published import KEY, publish, write_snapshot
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.stage_identity import identify
from xray_runtime.kernel.store import shared as module
from xray_runtime.kernel.store.checkpoints import Store, verify
from xray_runtime.kernel.store.digest_memory import DigestMemory
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.kernel.store.shared import INDEX, DamagedError, SharedStore, StorageError
from xray_runtime.kernel.store.snapshots import FencedError, Snapshots
from xray_runtime.kernel.tracking.recorder import StageRecorder
from xray_runtime.methods.fresh_base.kind import FRESH_BASE
from xray_runtime.methods.loading import validate
from xray_runtime.trust.keys import exchange_keys, read_rotations, rotate, trust, trusted_keys
from xray_runtime.trust.signing import public_key, read_public, signing_key

NAME = f"checkpoints/sft-{KEY[:12]}"


@pytest.fixture(params=["memory", "file"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedStore]:
    """An object store, and one with directories."""
    url = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else (tmp_path / "shared").as_uri()
    yield SharedStore(url)
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


def objects(shared: SharedStore) -> list[str]:
    """All objects, as paths below the store's root."""
    shared._fs.invalidate_cache()
    return sorted(path.removeprefix(shared._root + "/") for path in shared._fs.find(shared._root))


def tamper(shared: SharedStore, ending: str, content: bytes | None) -> None:
    """Change, or remove, the one object whose name ends so."""
    (name,) = [name for name in objects(shared) if name.endswith(ending)]
    path = f"{shared._root}/{name}"
    if content is None:
        shared._fs.rm(path)
    else:
        shared._fs.pipe_file(path, content)


def directory(at: Path, **files: bytes) -> Path:
    for name, content in files.items():
        (at / name.replace("__", "/")).parent.mkdir(parents=True, exist_ok=True)
        (at / name.replace("__", "/")).write_bytes(content)
    return at


def fetched(shared: SharedStore, name: str, into: Path) -> dict[str, bytes] | None:
    into.mkdir()
    if shared.get(name, into) is None:
        return None
    return {p.relative_to(into).as_posix(): p.read_bytes() for p in into.rglob("*") if p.is_file()}


def test_stored_directories_are_fetched_whole(shared: SharedStore, tmp_path: Path) -> None:
    shared.check()
    assert objects(shared) == []
    assert fetched(shared, "a/b", tmp_path / "0") is None
    shared.put("a/b", directory(tmp_path / "x", model=b"weights", head__h=b"head", empty=b""))
    assert fetched(shared, "a/b", tmp_path / "1") == {"model": b"weights", "head/h": b"head", "empty": b""}
    before = objects(shared)
    shared.put("a/b", tmp_path / "x")
    assert objects(shared) == before
    assert shared.names("a") == ["b"]
    shared.remove("a/b")
    assert (objects(shared), shared.names("a")) == ([], [])


def test_a_torn_upload_is_not_there(shared: SharedStore, tmp_path: Path) -> None:
    directory(tmp_path / "x", first=b"1", second=b"2")
    put_file, sent = shared._fs.put_file, []

    def cut_short(source: str, target: str) -> None:
        if sent:
            raise KeyboardInterrupt
        sent.append(target)
        put_file(source, target)

    shared._fs.put_file = cut_short
    with pytest.raises(KeyboardInterrupt):
        shared.put("a", tmp_path / "x")
    shared._fs.put_file = put_file
    assert len(objects(shared)) == 1
    assert fetched(shared, "a", tmp_path / "0") is None
    shared.put("a", tmp_path / "x")
    assert fetched(shared, "a", tmp_path / "1") == {"first": b"1", "second": b"2"}


@pytest.mark.parametrize(("content", "said"), [(b"weightz", "model was changed"), (None, "model is missing")])
def test_damage_is_named(shared: SharedStore, tmp_path: Path, content: bytes | None, said: str) -> None:
    shared.put("a", directory(tmp_path / "x", model=b"weights", other=b"o"))
    tamper(shared, "/model", content)
    with pytest.raises(DamagedError, match=said) as damage:
        fetched(shared, "a", tmp_path / "1")
    assert shared.url in str(damage.value)


def test_a_path_that_leaves_the_directory_is_refused(shared: SharedStore, tmp_path: Path) -> None:
    shared.put("a", directory(tmp_path / "x", model=b"weights"))
    text = shared.read(f"a/{INDEX}")
    assert text is not None
    shared.write(f"a/{INDEX}", text.replace(b'"model"', b'"../outside"'))
    with pytest.raises(DamagedError, match=r"unsafe path '\.\./outside'"):
        fetched(shared, "a", tmp_path / "1")
    assert not (tmp_path / "outside").exists()


class Away:
    """A store that does not answer `times` times."""

    def __init__(self, shared: SharedStore, times: int, error: Exception) -> None:
        self._left, self._error, self.asked = times, error, 0
        for name in ("cat_file", "pipe_file", "put_file", "get_file", "ls"):
            setattr(shared._fs, name, self._faulty(getattr(shared._fs, name)))

    def _faulty(self, call: Any) -> Any:
        def called(*args: Any, **more: Any) -> Any:
            self.asked += 1
            if self._left > 0:
                self._left -= 1
                raise self._error
            return call(*args, **more)

        return called


@pytest.fixture
def alone(tmp_path: Path) -> SharedStore:
    """A store whose file system is this test's own."""
    store = SharedStore((tmp_path / "alone").as_uri())
    store._fs = fsspec.implementations.local.LocalFileSystem(skip_instance_cache=True)
    return store


def test_a_store_that_is_away_is_waited_for(
    alone: SharedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    directory(tmp_path / "x", model=b"weights")
    Away(alone, 3, ConnectionResetError("peer went"))
    alone.put("a", tmp_path / "x")
    assert waits == [1.0, 2.0, 4.0]
    assert fetched(alone, "a", tmp_path / "1") == {"model": b"weights"}
    assert "peer went; trying again in 4 s" in caplog.text


def test_retries_end_and_permanent_errors_are_raised_at_once(
    alone: SharedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module.time, "sleep", lambda s: clock.__setitem__(0, clock[0] + s))
    away = Away(alone, 1000, ConnectionResetError("peer went"))
    with pytest.raises(StorageError, match="reading a: peer went"):
        alone.read("a")
    assert module.PATIENCE_S - module.LONGEST_WAIT_S <= clock[0] <= module.PATIENCE_S
    for error in (PermissionError("Access Denied"), OSError(28, "No space left on device")):
        away._error, away.asked = error, 0
        with pytest.raises(StorageError, match=r"Access Denied|No space left"):
            alone.write("a", b"x")
        assert away.asked == 1


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://me:secret@bucket/x", "a password is not allowed"),
        ("memory://x", "must be reachable from other processes"),
        ("file://relative", "must be reachable from other processes"),
        ("/no/url", "must match"),
        ("s3://bucket/x?key=secret", "must match"),
    ],
)
def test_urls_that_cannot_be_meant_are_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        validate({"runtime": {"storage": url}})
    assert str(refused.value).startswith("runtime.storage: ")
    assert url.startswith("s3://bucket") or "secret" not in str(refused.value)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(StorageError, match=r"'gs://bucket' is not allowed: .*gcsfs"):
        SharedStore("gs://bucket")


def test_keys_do_not_depend_on_where_things_are_kept(tmp_path: Path) -> None:
    def key(storage: str | None) -> str:
        runtime = RuntimeConfig(device="cpu", storage=storage)
        config = FRESH_BASE.validated({})
        identity, _ = identify(FRESH_BASE, "base", config, 0, runtime, {}, {}, DigestMemory(tmp_path / "memory"))
        return identity.key

    assert key("s3://b/x") == key(None)


def test_a_checkpoint_goes_from_one_directory_to_another(shared: SharedStore, tmp_path: Path) -> None:
    made = publish(tmp_path / "a", shared=shared)
    shutil.rmtree(tmp_path / "a")
    found = Store(tmp_path / "b", shared).find("sft", KEY)
    assert found is not None
    assert (found.sha256, found.path.parent) == (made.sha256, tmp_path / "b")
    assert verify(found.path, made.sha256) == []
    assert [p.name for p in (tmp_path / "b").iterdir()] == [found.path.name]
    Store(tmp_path / "c", shared).ensure_local(made.model_copy(update={"uri": str(tmp_path / "c" / found.path.name)}))
    assert verify(tmp_path / "c" / found.path.name, made.sha256) == []
    assert Store(tmp_path / "d", shared).find("sft", "cd" * 32) is None


def test_damaged_local_files_are_fetched_again(shared: SharedStore, tmp_path: Path) -> None:
    made = publish(tmp_path / "a", shared=shared)
    (made.path / "model.bin").write_bytes(b"weightz")
    assert Store(tmp_path / "a", shared).find("sft", KEY) == made
    assert verify(made.path, made.sha256) == []
    assert made.path.with_name(made.path.name + ".damaged-1").is_dir()


@pytest.mark.parametrize("ending", ["model.bin", MANIFEST])
def test_damaged_files_of_the_store_are_replaced(
    shared: SharedStore, tmp_path: Path, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = publish(tmp_path / "a", shared=shared)
    tamper(shared, f"/{ending}", b"weightz")
    other = Store(tmp_path / "b", shared)
    assert other.find("sft", KEY) is None
    assert f"{ending} was changed; the copy there is not used" in caplog.text
    assert list((tmp_path / "b").iterdir()) == []
    publish(tmp_path / "b", shared=shared)
    again = Store(tmp_path / "c", shared).find("sft", KEY)
    assert again is not None
    assert again.sha256 == made.sha256


def test_a_manifest_of_other_files_is_damage(shared: SharedStore, tmp_path: Path) -> None:
    """An index that agrees with its objects is not enough: the manifest is what the checkpoint is."""
    made = publish(tmp_path / "a")
    (made.path / "model.bin").write_bytes(b"weightz")
    shared.put(NAME, made.path)
    assert Store(tmp_path / "b", shared).find("sft", KEY) is None


def test_the_first_of_two_equal_results_counts(
    shared: SharedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = publish(tmp_path / "a", shared=shared)
    second = publish(tmp_path / "b", b"other weights", shared=shared)
    assert second.sha256 == first.sha256
    assert verify(second.path, first.sha256) == []
    assert "computed again with different bytes" in caplog.text


def test_an_upload_that_was_cut_off_is_made_up_for(shared: SharedStore, tmp_path: Path) -> None:
    made = publish(tmp_path / "a")
    assert objects(shared) == []
    here = Store(tmp_path / "a", shared)
    here.share(made)
    assert here.find("sft", KEY) == made
    assert Store(tmp_path / "b", shared).find("sft", KEY) is not None


def test_a_snapshot_is_found_from_another_directory(shared: SharedStore, tmp_path: Path) -> None:
    first = Snapshots(tmp_path / "a" / "sft-1", 1, process_seal(), shared)
    write_snapshot(first, 1)
    write_snapshot(first, 12, b"newer")
    assert shared.names("snapshots/sft-1") == ["owner", "step-0000000012"]
    shutil.rmtree(tmp_path / "a")
    second = Snapshots(tmp_path / "b" / "sft-1", 1, process_seal(), shared)
    found = second.latest()
    assert found is not None
    assert (found.step, found.state) == (12, {"step": 12})
    assert (found.directory / "policy" / "part").read_bytes() == b"newer"
    second.clear()
    assert objects(shared) == []


def test_the_newer_of_here_and_there_counts(shared: SharedStore, tmp_path: Path) -> None:
    here = Snapshots(tmp_path / "a" / "sft-1", 1, process_seal(), shared)
    write_snapshot(here, 3)
    shutil.copytree(tmp_path / "a", tmp_path / "old")
    write_snapshot(here, 4)
    stale = Snapshots(tmp_path / "old" / "sft-1", 1, process_seal(), shared).latest()
    assert stale is not None
    assert stale.step == 4
    shared.remove("snapshots/sft-1/step-0000000004")
    local = Snapshots(tmp_path / "a" / "sft-1", 1, process_seal(), shared).latest()
    assert local is not None
    assert local.step == 4


def test_a_damaged_snapshot_there_is_skipped(
    shared: SharedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_snapshot(Snapshots(tmp_path / "a" / "sft-1", 1, process_seal(), shared), 3)
    tamper(shared, "/part", b"weightz")
    assert Snapshots(tmp_path / "b" / "sft-1", 1, process_seal(), shared).latest() is None
    assert "part was changed; the snapshot before it is used" in caplog.text
    assert list((tmp_path / "b" / "sft-1").glob("step-*")) == []


def test_an_attempt_on_another_machine_fences_this_one(shared: SharedStore, tmp_path: Path) -> None:
    older = Snapshots(tmp_path / "a" / "sft-1", 1, process_seal(), shared)
    write_snapshot(older, 3)
    newer = Snapshots(tmp_path / "b" / "sft-1", 1, process_seal(), shared)
    older.check()  # on another machine nothing here tells of it
    with pytest.raises(FencedError, match="another attempt"):
        write_snapshot(older, 4)
    found = newer.latest()
    assert found is not None
    assert found.step == 3
    write_snapshot(newer, 4)
    assert shared.names("snapshots/sft-1") == ["owner", "step-0000000004"]


def test_metrics_go_with_the_snapshot(shared: SharedStore, tmp_path: Path) -> None:
    def recorder(output: Path) -> StageRecorder:
        return StageRecorder(output, "sft", KEY, None, lambda *_: None, 1, process_seal(), shared)

    first = recorder(tmp_path / "a")
    first.begin()
    first.metrics({"loss": 3.0}, 0)
    first.write_snapshot(1, {}, lambda directory: None)
    first.metrics({"loss": 2.0}, 1)
    first.close()
    second = recorder(tmp_path / "b")
    second.begin()
    second.metrics({"loss": 2.0}, 1)
    second.close()
    lines = second.metrics_path.read_text().splitlines()
    assert ['"step": 0' in lines[0], '"step": 1' in lines[1], len(lines)] == [True, True, 2]


def test_kept_answers_follow_the_snapshots(shared: SharedStore, tmp_path: Path) -> None:
    first = Snapshots(tmp_path / "a" / "ppo-1", 1, process_seal(), shared)
    assert first.kept is not None
    assert first.kept.read() == {}
    first.kept.write("2-answers", b"two")
    first.kept.write("1-answers", b"one")
    write_snapshot(first, 1)
    write_snapshot(first, 2)
    second = Snapshots(tmp_path / "b" / "ppo-1", 1, process_seal(), shared)
    assert second.kept is not None
    assert list(second.kept.read().items()) == [("1-answers", b"one"), ("2-answers", b"two")]
    found = second.latest()
    assert found is not None
    assert found.step == 2
    second.clear()
    assert objects(shared) == []
    assert Snapshots(tmp_path / "c" / "ppo-1", 1, process_seal()).kept is None


def test_a_retired_key_comes_along_as_one_that_is_retired(
    shared: SharedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a directory that trusts its successor: both sign with the new key from here on."""
    ours, theirs = tmp_path / "a", tmp_path / "b"
    signing_key(ours)
    rotate(ours, by="a person", note="", new_key=tmp_path / "new.pem")
    monkeypatch.setenv("XRAY_SIGNING_KEY", str(tmp_path / "new.pem"))
    signing_key(theirs)
    for output in (ours, theirs):
        exchange_keys(output, shared)
    [rotation] = read_rotations(ours)[0]
    assert read_rotations(theirs) == ([rotation], [])
    until = {key.sha256: key.until for key in trusted_keys(theirs)}
    assert until == {rotation.retired: rotation.at, rotation.successor: None}


def test_no_key_is_trusted_because_it_lies_in_the_store(shared: SharedStore, tmp_path: Path) -> None:
    """An attacker who can write there can put one there, or the record of a rotation to it."""
    ours, theirs = tmp_path / "a", tmp_path / "b"
    signing_key(theirs)
    rotate(theirs, by="a person", note="")
    for output in (theirs, ours, theirs):
        signing_key(output)
        exchange_keys(output, shared)
    assert [key.sha256 for key in trusted_keys(ours)] == [read_public(public_key(ours)).sha256]
    assert read_rotations(ours) == ([], [])
    assert not any("PRIVATE" in (shared.read(name) or b"").decode() for name in objects(shared))
    # A person says whose it is.
    assert trust(ours, public_key(theirs)) == read_public(public_key(theirs)).sha256
    exchange_keys(ours, shared)
    assert {key.sha256 for key in trusted_keys(ours)} > {key.sha256 for key in trusted_keys(theirs)}
    assert len(trusted_keys(ours)) == 3
