"""The keys of an output directory in an audit."""

from __future__ import annotations

from collections.abc import Iterator

from xray_runtime.kernel.history.audit_check import AuditCheck, Audited, Finding, Meaning
from xray_runtime.trust.signing import exposed_keys

CODES = {
    "rotation-broken": Meaning(
        "The record of a key rotation is incomplete, or not signed by both keys.",
        "Restore keys/retired/ from a copy: until then, signatures of the old key count as foreign.",
    ),
    "key-missing": Meaning(
        "There is no usable public key to check signatures with.",
        "Name it with --public-key, or put it back at keys/signing.pub.",
    ),
    "key-exposed": Meaning(
        "Users other than its owner can, or could, use the signing key.",
        "Its signatures since then may be somebody else's: change the mode, rotate the key, and ask who had access.",
    ),
}


def _check(audited: Audited) -> Iterator[Finding]:
    yield from (Finding("keys", "key-exposed", text) for text in exposed_keys(audited.store.output))


CHECK = AuditCheck(
    "who can use the private key, and which public keys can be used", CODES, _check, needs=frozenset({"whole"})
)
