"""Evidence as X-ray ships it: elliptic-curve keys in the output directory, signed statements, and the signed log."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from xray_runtime.kernel.evidence.envelope import Verifier
from xray_runtime.kernel.evidence.statement import RunFacts
from xray_runtime.kernel.history.evidence import Attest, Evidence
from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.store.shared import SharedStore
from xray_runtime.trust import attestation, keys, log
from xray_runtime.trust.signing import require_signer, signing_key


class SignedEvidence:
    """See `kernel.history.evidence.Evidence`."""

    append = staticmethod(log.append)
    log_checkpoints = staticmethod(log.log_checkpoints)
    log_files = staticmethod(log.log_files)
    sign_line = staticmethod(log.sign_line)
    append_line = staticmethod(log.append_line)
    trusted_view = staticmethod(keys.trusted_view)
    sound_view = staticmethod(keys.sound_view)
    seal = staticmethod(keys.seal_of)
    open_store = staticmethod(attestation.open_store)
    publish_card = staticmethod(attestation.publish_card)

    require_signer = staticmethod(require_signer)

    def prepare(self, output: Path, shared: SharedStore | None) -> None:
        # A directory takes over no key that cannot sign.
        require_signer()
        signing_key(output)
        keys.exchange_keys(output, shared)
        keys.keep_log_state(output)

    def verifier(self, output: Path, public: Path | None = None) -> Verifier:
        return Verifier(keys.trusted_keys(output, public))

    def attest(self, output: Path, *, parents: Mapping[str, CheckpointRef], run: RunFacts, started: datetime) -> Attest:
        private = signing_key(output)
        return partial(attestation.attest, parents=parents, run=run, started=started, private_key=private)

    # The others import what a stage does not need.

    def audit(self, store: LineageStore, nodes: list[Node], public: Path | None) -> list[str]:
        from xray_runtime.trust.audit.checkpoints import audit

        return audit(store, nodes, public=public).broken

    def register_policy(self, *args: Any, **fields: Any) -> str:
        from xray_runtime.trust.model_page import register_policy

        return register_policy(*args, **fields)

    def checkpoint_from(self, ref: str, output: Path, tracking_uri: str | None) -> CheckpointRef:
        from xray_runtime.trust.adopt import checkpoint_from

        return checkpoint_from(ref, output, tracking_uri)


EVIDENCE: Evidence = SignedEvidence()
