"""The OpenSSF signature of a published model, which the public `model_signing verify` accepts without X-ray.

    model_signing verify key DIR --signature DIR/model.sig --public_key signing.pub

It covers every file of the directory but the model card, which an evaluation replaces (the signature names what it does
not cover). The lineage is in the statement beside it: see `attestation`. The package hashes nothing here: the manifest
has the digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from xray_runtime.kernel.evidence.envelope import (
    SignatureProblem,
    TrustedKey,
    Verifier,
    load_signer,
    public_key,
    read_envelope,
)
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.store.manifest import ATTESTATION, CARD, MANIFEST, SIGNATURE, Manifest

LEFT_OUT = (CARD, SIGNATURE)
"""Files that the signature does not cover."""


def signed_files(directory: Path, manifest: Manifest, sha256: str) -> dict[str, str]:
    """Path → sha256 of the files that the signature of a model must cover."""
    record = {f"{ATTESTATION}/{path.name}": file_sha256(path) for path in (directory / ATTESTATION).iterdir()}
    return {entry.path: entry.sha256 for entry in manifest.files} | {MANIFEST: sha256} | record


def sign_model(directory: Path, files: Mapping[str, str], private: Path) -> None:
    """Write the signature of a model with these files (path → sha256); `private`: file of the key."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from model_signing import hashing, manifest, signing
    from model_signing._hashing.hashing import Digest
    from model_signing._signing.sign_ec_key import Signer

    key = load_signer(private.read_bytes())

    class Known(hashing.Config):
        """Takes the digests of the files from here."""

        def hash(self, model_path: object, *, files_to_hash: object = None) -> manifest.Manifest:
            options = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": LEFT_OUT}
            form = manifest.SerializationType.from_args(options)
            items = [form.new_item(name, Digest("sha256", bytes.fromhex(sha256))) for name, sha256 in files.items()]
            return manifest.Manifest(directory.name, items, form)

    class Held:
        """The private key, which perhaps only an agent has."""

        def public_key(self) -> object:
            return load_pem_public_key(TrustedKey(public_key(key)).pem)

        def sign(self, content: bytes, algorithm: object) -> bytes:
            # Both packages take the same hash for a curve.
            return bytes.fromhex(key.sign(content).signature)

    class HeldSigner(Signer):
        def __init__(self) -> None:
            self._private_key = Held()  # type: ignore[assignment]  # it has what is called

    config = signing.Config().set_hashing_config(Known())
    config._signer = HeldSigner()
    config.sign(directory, directory / SIGNATURE)


def check_model_signature(directory: Path, files: Mapping[str, str], verifier: Verifier, made: str | None) -> None:
    """Check the signature of a model without reading its files.

    Args:
        files: path → sha256 of those that it must cover.
        made: as for `Verifier.check`.

    Raises:
        SignatureProblem: it is missing, not by a trusted key, or of other files.
    """
    try:
        bundle = json.loads(read_bounded(directory / SIGNATURE))
        keyid = str(bundle["verificationMaterial"]["publicKey"]["hint"])
        envelope = read_envelope(json.dumps(bundle["dsseEnvelope"]).encode(), keyid)
        predicate = json.loads(envelope.payload)["predicate"]
        covered = {resource["name"]: resource["digest"] for resource in predicate["resources"]}
        left_out = set(predicate["serialization"]["ignore_paths"])
    except FileNotFoundError:
        raise SignatureProblem("missing", f"there is no {SIGNATURE}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SignatureProblem("malformed", f"{SIGNATURE} cannot be read ({type(error).__name__})") from None
    try:
        verifier.check(envelope, made)
    except SignatureProblem as problem:
        raise SignatureProblem(problem.code, f"{SIGNATURE}: {problem}") from None
    differing = sorted(name for name in {*files, *covered} if files.get(name) != covered.get(name))
    if differing or left_out != set(LEFT_OUT):
        what = differing[0] if differing else ", ".join(sorted(left_out))
        raise SignatureProblem("invalid", f"{SIGNATURE} does not cover the files as they are: {what}")
