"""Evidence as X-ray ships it: elliptic-curve keys in the output directory, signed statements, and the signed log."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from xray_runtime.kernel.evidence.statement import InTotoRecord, RunFacts
from xray_runtime.kernel.evidence.view import LogView, SignedEntry
from xray_runtime.kernel.history.evidence import Attest, Evidence
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.checkpoints import Store
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.store.seal import Seal
from xray_runtime.kernel.store.shared import SharedStore
from xray_runtime.kernel.tracking.registry import ModelRegistry
from xray_runtime.trust import attestation, keys, log, trusted_log
from xray_runtime.trust.signed_lines import append_signed_line, signed_line
from xray_runtime.trust.signing import Verifier, signing_key


class SignedEvidence:
    """See `kernel.history.evidence.Evidence`."""

    def prepare(self, output: Path, shared: SharedStore | None) -> None:
        signing_key(output)
        keys.exchange_keys(output, shared)

    def append(
        self,
        output: Path,
        entry: SignedEntry,
        files: Mapping[str, str] | None = None,
        *,
        private: Path | None = None,
        locked: bool = False,
    ) -> None:
        write = log.append_locked if locked else log.append
        write(output, private or signing_key(output), entry, files)

    def log_checkpoints(
        self,
        output: Path,
        checkpoints: Mapping[str, str],
        files: Mapping[str, str] | None = None,
        *,
        here: bool,
        renew: bool = False,
    ) -> None:
        log.log_checkpoints(output, signing_key(output), checkpoints, files, here=here, renew=renew)

    def log_files(self, output: Path, paths: list[Path], note: str) -> None:
        log.log_files(output, signing_key(output), paths, note)

    def sign_line(
        self, output: Path, record: type[InTotoRecord[Any]], entry: SignedEntry, files: Mapping[str, str]
    ) -> bytes:
        return signed_line(record, entry, files, signing_key(output))

    def append_line(
        self,
        output: Path,
        path: Path,
        record: type[InTotoRecord[Any]],
        entry: SignedEntry,
        files: Mapping[str, str],
        private: Path | None = None,
    ) -> bytes:
        return append_signed_line(path, record, entry, files, private or signing_key(output))

    def verifier(self, output: Path, public: Path | None = None) -> Verifier:
        return Verifier(keys.trusted_keys(output, public))

    def trusted_view(self, output: Path) -> LogView:
        return trusted_log.trusted_view(output)

    def seal(self, output: Path) -> Seal:
        return keys.seal_of(output)

    def open_store(self, output: Path, shared: SharedStore | None = None) -> Store:
        return attestation.open_store(output, shared)

    def attest(self, output: Path, *, parents: Mapping[str, CheckpointRef], run: RunFacts, started: datetime) -> Attest:
        private = signing_key(output)
        return partial(attestation.attest, parents=parents, run=run, started=started, private_key=private)

    def audit(self, store: LineageStore, nodes: list[Node], public: Path | None) -> list[str]:
        from xray_runtime.trust.audit.checkpoints import audit

        return audit(store, nodes, public=public).broken

    def publish_card(self, evaluation: Path, policy: Path) -> None:
        attestation.publish_card(evaluation, policy)

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
        from xray_runtime.trust.model_page import register_policy

        return register_policy(output, registry, name, policy, run_id, evaluation, by=by, note=note)

    def checkpoint_from(self, ref: str, output: Path, tracking_uri: str | None) -> CheckpointRef:
        from xray_runtime.trust.adopt import checkpoint_from

        return checkpoint_from(ref, output, tracking_uri)


EVIDENCE: Evidence = SignedEvidence()
