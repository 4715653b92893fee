"""Snapshots of a stage at work: another attempt continues from the newest whole one as if nothing had happened.

They lie under the stage's key, so only the same computation finds them. A snapshot is written to a temporary directory,
its list of digests and the seal over it last, fsynced and renamed; only then is the previous one removed. One that
differs from its seal is skipped. Each attempt takes the directory over with its own token: later writes of an older
attempt (on a lost node, say) are refused.

The digest of a model's shard is taken from the index that its rank wrote beside it. `latest` trusts it too: the ranks
check the shards before they read them, and a snapshot with a damaged one is refused.

With a shared store every snapshot is copied there before the previous one is removed here or there, and an attempt on
any machine continues from the newest one in either; the token is there too. Other files that a stage keeps between
attempts go to `kept` and are removed with the snapshots.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xray_runtime.kernel.files import sync, write_atomic
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import file_entries
from xray_runtime.kernel.store.seal import Seal
from xray_runtime.kernel.store.shards import recorded_sha256, written_sha256
from xray_runtime.kernel.store.shared import DamagedError, SharedFolder, SharedStore

log = logging.getLogger(__name__)

FILES = "files.json"
SEAL = "files.seal"
STATE = "state.json"
OWNER = "owner"
SNAPSHOTS = "snapshots"
KEPT = "kept"
MAX_SHARE = 0.04
"""Largest part of a stage's time that periodic snapshots may take."""


class FencedError(RuntimeError):
    """Another attempt at the same stage has started; this one must stop writing."""


@dataclass(frozen=True)
class Snapshot:
    """A whole snapshot on disk."""

    directory: Path
    step: int
    """Steps done."""
    state: dict[str, Any]


class Snapshots:
    """The snapshots of one stage under one key. Opening them fences every earlier attempt.

    Args:
        every: steps between periodic snapshots.
        every_s: seconds after which one is due even if fewer steps were made.
        seal: signs snapshots; only those with its signature are read.
        shared: keeps copies below `snapshots/` and the name of `directory`.
    """

    def __init__(
        self, directory: Path, every: int, seal: Seal, shared: SharedStore | None = None, every_s: float = math.inf
    ) -> None:
        self.directory, self._every, self._every_s, self._seal = directory, every, every_s, seal
        self._shared, self._folder = shared, f"{SNAPSHOTS}/{directory.name}"
        self.kept = SharedFolder(shared, f"{self._folder}/{KEPT}") if shared is not None else None
        directory.mkdir(parents=True, exist_ok=True)
        self._token = uuid.uuid4().hex
        write_atomic(directory / OWNER, self._token)
        if shared is not None:
            shared.write(f"{self._folder}/{OWNER}", self._token.encode())
        for left in directory.glob("step-*.writing-*"):
            log.warning("%s: a snapshot that was never finished; removed", left)
            shutil.rmtree(left, ignore_errors=True)
        self._start, self._spent = time.monotonic(), 0.0
        self._last = self._start
        """When the last snapshot was written."""
        self._refused: set[str] = set()
        """Names of snapshots here with a damaged shard."""
        self._fetched: set[str] = set()
        """Names that were fetched, or found damaged in the shared store."""

    def check(self) -> None:
        """Raises FencedError where another attempt has taken over."""
        try:
            owner = (self.directory / OWNER).read_text()
        except FileNotFoundError:
            owner = ""
        if owner != self._token:
            raise FencedError(f"{self.directory.name}: another attempt at this stage has started; this one stops")

    def due(self, step: int) -> bool:
        """Whether a periodic snapshot is due after `step` steps: every so many steps and every so many seconds, within
        MAX_SHARE of the time."""
        now = time.monotonic()
        wanted = step % self._every == 0 or now - self._last >= self._every_s
        return wanted and self._spent <= MAX_SHARE * (now - self._start)

    def latest(self) -> Snapshot | None:
        """The newest whole snapshot; torn or changed ones are skipped, with a line in the log. Raises StorageError: the
        shared store stayed away."""
        here = next(self._sound(), None)
        snapshot = self._fetch(here.name if here is not None else "") or here
        if snapshot is None:
            return None
        return Snapshot(snapshot, int(snapshot.name.removeprefix("step-")), json.loads((snapshot / STATE).read_text()))

    def refuse(self, snapshot: Snapshot, problem: str) -> None:
        """Do not use a snapshot any more, in which a rank found a damaged shard."""
        log.warning("%s; the snapshot before it is used", problem)
        self._refused.add(snapshot.directory.name)

    def _sound(self) -> Iterator[Path]:
        """The whole snapshots here, newest first."""
        for snapshot in sorted(self.directory.glob("step-" + "[0-9]" * 10), reverse=True):
            if snapshot.name in self._refused:
                continue
            problem = snapshot_problem(snapshot, self._purpose(snapshot.name), self._seal, recorded_sha256)
            if problem is None:
                yield snapshot
            else:
                log.warning("%s: %s; the snapshot before it is used", snapshot, problem)

    def _fetch(self, newer_than: str) -> Path | None:
        """Fetch the newest whole snapshot of the shared store that is newer than `newer_than`."""
        while self._shared is not None:
            # Listed again each time: an older attempt that still runs may just have replaced it.
            names = [name for name in self._shared.names(self._folder) if name.startswith("step-")]
            name = max((name for name in names if name > newer_than and name not in self._fetched), default=None)
            if name is None:
                break
            self._fetched.add(name)
            snapshot, temporary = self.directory / name, self.directory / f"{name}.writing-{self._token}"
            try:
                temporary.mkdir()
                index = self._shared.get(f"{self._folder}/{name}", temporary)
                if index is not None:
                    # Every byte agrees with the index.
                    fetched = {temporary / entry.path: entry.sha256 for entry in index.files}
                    problem = snapshot_problem(temporary, self._purpose(name), self._seal, fetched.get)
                    if problem is not None:
                        raise DamagedError(f"{self._shared.url}/{self._folder}/{name}: {problem}")
                    shutil.rmtree(snapshot, ignore_errors=True)
                    os.rename(temporary, snapshot)
                    sync(self.directory)
                    self._refused.discard(name)
                    log.info("%s: fetched from %s", name, self._shared.url)
                    return snapshot
            except DamagedError as error:
                log.warning("%s; the snapshot before it is used", error)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return None

    @contextlib.contextmanager
    def writing(self, step: int, state: dict[str, Any]) -> Iterator[Path]:
        """A directory for the snapshot after `step` steps, published when the block ends without an error.

        Raises:
            OSError: it cannot be written (a full disk); the snapshot before is whole.
            FencedError: another attempt has taken over.
            StorageError: the shared store did not take it; it lies here.
        """
        start = time.monotonic()
        snapshot = self.directory / f"step-{step:010d}"
        temporary = self.directory / f"{snapshot.name}.writing-{self._token}"
        try:
            temporary.mkdir()
            yield temporary
            write_atomic(temporary / STATE, json.dumps(state))
            entries = file_entries(temporary, _synced_sha256)
            listed = json.dumps({entry.path: (entry.sha256, entry.size) for entry in entries}).encode()
            write_atomic(temporary / FILES, listed)
            seal = self._seal.sign(self._purpose(snapshot.name), listed)
            write_atomic(temporary / SEAL, seal)
            self.check()
            if snapshot.exists():
                # An earlier attempt's snapshot of the same step was not sound.
                shutil.rmtree(snapshot)
            os.rename(temporary, snapshot)
            sync(self.directory)
        except OSError as error:
            if error.errno is None:
                # Not the file system's error: the signing key's, whose message says so.
                raise
            raise OSError(
                error.errno, f"{self.directory}: the snapshot after step {step} cannot be written ({error.strerror})"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._share(snapshot)
        for old in self.directory.glob("step-" + "[0-9]" * 10):
            if old != snapshot:
                shutil.rmtree(old, ignore_errors=True)
        self._last = time.monotonic()
        self._spent += self._last - start

    def clear(self) -> None:
        """Remove everything: the stage is published."""
        if self._shared is not None:
            self._shared.remove(self._folder)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _purpose(self, name: str) -> str:
        return snapshot_purpose(self.directory / name)

    def _share(self, snapshot: Path) -> None:
        if self._shared is None:
            return
        if self._shared.read(f"{self._folder}/{OWNER}") != self._token.encode():
            raise FencedError(f"{self.directory.name}: another attempt at this stage has started; this one stops")
        self._shared.put(f"{self._folder}/{snapshot.name}", snapshot, written_sha256)
        # Later ones stay: an attempt that took over since the check may have written them.
        for name in self._shared.names(self._folder):
            if name.startswith("step-") and name < snapshot.name:
                self._shared.remove(f"{self._folder}/{name}")


def snapshot_purpose(snapshot: Path) -> str:
    """The purpose of a snapshot's seal: its step, in the directory of its stage and key."""
    return f"{SNAPSHOTS}/{snapshot.parent.name}/{snapshot.name}"


def snapshot_problem(
    snapshot: Path, purpose: str, seal: Seal, sha256: Callable[[Path], str | None] = file_sha256
) -> str | None:
    """Why a snapshot must not be used; None where every file was sealed for this purpose with its `sha256`."""
    try:
        listed = read_bounded(snapshot / FILES)
        if not seal.holds(purpose, listed, read_bounded(snapshot / SEAL).decode()):
            return "not sealed with this run's key"
        digests = json.loads(listed)
        present = {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if not path.is_dir()}
        differing = present ^ {*digests, FILES, SEAL}
        if differing:
            return f"{min(differing)} was added or is missing"
        for path, (sealed, size) in digests.items():
            status = os.lstat(snapshot / path)
            # A file of another size is not read.
            if not stat.S_ISREG(status.st_mode) or status.st_size != size or sha256(snapshot / path) != sealed:
                return f"{path} was changed"
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        return f"torn ({error})"
    return None


def _synced_sha256(path: Path) -> str:
    sync(path)
    return written_sha256(path)
