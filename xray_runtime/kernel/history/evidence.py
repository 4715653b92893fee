"""The interface of evidence: stages, tasks and live services sign what they did, and ask what may be trusted.

`xray_runtime.trust.attesters` has the one implementation; a package of somebody else that declares an entry point
`xray.evidence` takes its place.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.envelope import InTotoRecord, Verifier
from xray_runtime.kernel.evidence.statement import RunFacts
from xray_runtime.kernel.evidence.view import LogView, SignedEntry
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.plugs import Registry
from xray_runtime.kernel.store.checkpoints import Store, read_bounded
from xray_runtime.kernel.store.manifest import Manifest
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.store.seal import Seal
from xray_runtime.kernel.store.shared import SharedStore
from xray_runtime.kernel.tracking.registry import ModelRegistry

log = logging.getLogger(__name__)

SHIPPED = "signed"
MAX_BYTES = 2**30
"""The size of a record: metrics of a long run have some 100 MB."""
Attest = Callable[[Path, Manifest, str], None]
"""Writes the record of a checkpoint: its directory, its manifest, and the manifest's sha256."""


class Evidence(Protocol):
    """Signs with the key of an output directory, and checks with the keys that it trusts.

    Args of several methods:
        private: file of the signing key, by default that of the output directory.
        files: path below `output` → sha256.
    """

    def require_signer(self) -> None:
        """Raises ConfigError where the key that was given for all output directories cannot sign now."""

    def prepare(self, output: Path, shared: SharedStore | None) -> None:
        """Make the keys of an output directory, and exchange public ones with a shared store."""

    def append(
        self,
        output: Path,
        entry: SignedEntry,
        files: Mapping[str, str] | None = None,
        *,
        private: Path | None = None,
        locked: bool = False,
    ) -> None:
        """Sign an entry and append it to the log; `locked`: the caller holds the lock `log`."""

    def log_checkpoints(
        self,
        output: Path,
        checkpoints: Mapping[str, str],
        files: Mapping[str, str] | None = None,
        *,
        here: bool,
        renew: bool = False,
        private: Path | None = None,
    ) -> None:
        """Log that checkpoints are in the store, unless the log says so already; see `log.log_checkpoints`."""

    def log_files(self, output: Path, paths: list[Path], note: str, *, private: Path | None = None) -> None:
        """Log files that were just written for people, unless the log lists the same."""

    def sign_line(
        self,
        output: Path,
        record: type[InTotoRecord[Any]],
        entry: SignedEntry,
        files: Mapping[str, str],
        *,
        private: Path | None = None,
    ) -> bytes:
        """An entry as the first line of a file."""

    def append_line(
        self,
        output: Path,
        path: Path,
        record: type[InTotoRecord[Any]],
        entry: SignedEntry,
        files: Mapping[str, str],
        *,
        private: Path | None = None,
    ) -> bytes:
        """Sign an entry and append it to a file of signed lines; returns the line."""

    def verifier(self, output: Path, public: Path | None = None) -> Verifier:
        """Checks with the trusted keys, or with `public` alone. Raises OSError or ValueError: one cannot be used."""

    def trusted_view(self, output: Path) -> LogView:
        """The state that the log describes up to the first entry that is not sound; empty without a trusted key."""

    def sound_view(self, output: Path, public: Path | None = None) -> LogView:
        """The state that the log describes. Raises ValueError unless all of it is sound; or as `verifier`."""

    def seal(self, output: Path) -> Seal:
        """Seals and checks files that runs keep."""

    def open_store(self, output: Path, shared: SharedStore | None = None) -> Store:
        """The checkpoints of an output directory; those that no trusted key signed are not used."""

    def attest(self, output: Path, *, parents: Mapping[str, CheckpointRef], run: RunFacts, started: datetime) -> Attest:
        """Writes and signs the record of a checkpoint that is about to be published; `parents`: by role."""

    def audit(self, store: LineageStore, nodes: list[Node], public: Path | None) -> list[str]:
        """Code and subject of everything that is not sound about checkpoints and their ancestors."""

    def publish_card(self, evaluation: Path, policy: Path) -> None:
        """Put the card with the results of an evaluation beside the weights of the policy it judged."""

    def register_policy(
        self,
        output: Path,
        registry: ModelRegistry,
        name: str,
        policy: CheckpointRef,
        run_id: str,
        evaluation: CheckpointRef | None,
        *,
        by: str | None = None,
        note: str = "",
    ) -> str:
        """Make a policy the newest version of a registered model, on record; returns the version."""

    def checkpoint_from(self, ref: str, output: Path, tracking_uri: str | None) -> CheckpointRef:
        """The checkpoint that `ref` names, copied into an output directory if it is elsewhere."""


EVIDENCE = Registry[Evidence]("evidence", "xray_runtime.trust.attesters", "EVIDENCE", "xray.evidence")


@cache
def evidence() -> Evidence:
    """The implementation. Raises ValueError where several packages would take the place of the one that is shipped."""
    others = [name for name in EVIDENCE if name != SHIPPED]
    if len(others) > 1:
        raise ValueError(f"entry points xray.evidence: {', '.join(others)} are not allowed together: keep one")
    return EVIDENCE.get(*others or [SHIPPED])


def read_logged(output: Path, path: Path, limit: int = MAX_BYTES) -> bytes | None:
    """The bytes of a file below `output` if they are those that the log names; None with a warning if not."""
    return read_as_signed(path, evidence().trusted_view(output).files.get(path.relative_to(output).as_posix()), limit)


def read_as_signed(path: Path, sha256: str | None, limit: int = MAX_BYTES) -> bytes | None:
    """The bytes of a file if they have a digest; None without the file, and with a warning if they do not.

    They are read once: what is parsed is what was checked.
    """
    try:
        content = read_bounded(path, limit)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s; it is not used", first_line(error))
        return None
    if hashlib.sha256(content).hexdigest() == sha256:
        return content
    log.warning("%s: not what was signed; it is not used", path)
    return None
