"""The log's Merkle tree and notes against implementations of others: tlog-scales, and Sigstore's client for Rekor."""

from __future__ import annotations

import base64
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings, strategies as st
from sigstore._internal.merkle import verify_merkle_inclusion
from sigstore._internal.rekor.checkpoint import SignedCheckpoint
from sigstore._internal.trust import Key, Keyring, RekorKeyring
from sigstore_models.common import v1 as sigstore_keys
from tlog_scales.reader import TilesReader
from tlog_scales.signing import Ed25519CosignatureVerifier, Vkey
from tlog_scales.tlog import Checkpoint, ConsistencyProof, ConsistencyProofInvalid

from xray_runtime.kernel.evidence.envelope import (
    SignatureProblem,
    load_public,
    new_private_key,
    public_half,
)
from xray_runtime.trust.merkle import MerkleTree, entry_tiles, is_consistent, read_entries
from xray_runtime.trust.note import LogCheckpoint, WitnessKey, cosign

RFC = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
"""The entries of the test vectors of Certificate Transparency."""
RFC_ROOTS = {
    0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    4: "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    5: "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    6: "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    7: "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}


def leaves(size: int) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest() for number in range(size)]


def tree(entries: list[bytes]) -> MerkleTree:
    found = MerkleTree()
    for entry in entries:
        found.add(entry)
    return found


GROWN = tree(leaves(700))


def test_roots_are_those_of_the_published_vectors() -> None:
    found = tree([bytes.fromhex(entry) for entry in RFC])
    assert {size: found.root(size).hex() for size in RFC_ROOTS} == RFC_ROOTS


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 700), data=st.data())
def test_a_consistency_proof_is_that_of_another_implementation(size: int, data: st.DataObject) -> None:
    old = data.draw(st.integers(1, size))
    proof = GROWN.consistency(old, size)
    roots = GROWN.root(old), GROWN.root(size)
    ConsistencyProof(old, size, proof).check(*roots)
    assert is_consistent(old, roots[0], size, roots[1], proof)
    wrong: list[tuple[Any, ...]] = [
        (old, leaves(1)[0], size, roots[1], proof),
        (old, roots[0], size, leaves(1)[0], proof),
        (old, roots[0], size, roots[1], [*proof, leaves(1)[0]]),
        (old, roots[0], size + 1, roots[1], proof) if old == size else (old, roots[0], size, roots[1], proof[:-1]),
    ]
    for one in wrong:
        assert not is_consistent(*one)
        with pytest.raises(ConsistencyProofInvalid):
            ConsistencyProof(one[0], one[2], list(one[4])).check(one[1], one[3])


@pytest.mark.parametrize("size", [1, 255, 256, 257, 700])
def test_tiles_are_read_by_other_implementations(size: int) -> None:
    grown = tree(leaves(size))
    files = grown.tiles() | entry_tiles(leaves(size))
    files["checkpoint"] = str(LogCheckpoint("a.log", size, grown.root(size)).signed(new_private_key())).encode()
    backend: Any = SimpleNamespace(get=lambda *parts: files.get("/".join(parts)))
    reader = TilesReader(backend)
    assert reader.get_checkpoint().root_hash == grown.root(size)
    for index in {0, size // 2, size - 1}:
        proof = reader.get_inclusion_proof(index, size)
        inclusion = SimpleNamespace(
            log_index=index, tree_size=size, hashes=proof.node_hashes, root_hash=grown.root(size)
        )
        entry = SimpleNamespace(inclusion_proof=inclusion, canonicalized_body=leaves(size)[index])
        verify_merkle_inclusion(SimpleNamespace(_inner=entry))  # type: ignore[arg-type]
        assert reader.get_entry(index) == leaves(size)[index]


def test_a_tree_follows_a_log_that_grows_and_one_that_was_replaced() -> None:
    digests = [leaf.hex() for leaf in leaves(20)]
    found = MerkleTree()
    for end in (3, 3, 20):
        found.follow(digests[:end])
        assert found.root(len(found)) == GROWN.root(end)
    found.follow([*digests[:4], "ab" * 32])
    assert found.root(5) == tree([*leaves(4), bytes.fromhex("ab" * 32)]).root(5)
    found.follow(digests[:2])
    assert (len(found), found.root(2)) == (2, GROWN.root(2))


def test_a_checkpoint_is_a_note_that_sigstore_verifies() -> None:
    private = new_private_key()
    checkpoint = LogCheckpoint("xray.log/0123456789abcdef", 700, GROWN.root(700)).signed(private)
    public = load_public(public_half(private))
    details = sigstore_keys.PublicKeyDetails.PKIX_ECDSA_P256_SHA_256
    der = base64.b64decode("".join(public_half(private).decode().splitlines()[1:-1]))
    known = sigstore_keys.PublicKey(raw_bytes=base64.b64encode(der), key_details=details)
    ring, theirs = RekorKeyring(Keyring([known])), SignedCheckpoint.from_text(str(checkpoint))
    theirs.signed_note.verify(ring, Key(known).key_id)
    assert theirs.checkpoint.log_hash == GROWN.root(700).hex()
    checkpoint.require_signer([public])
    for other in (new_private_key(), None):
        forged = LogCheckpoint(checkpoint.origin, 699, checkpoint.root, checkpoint.signatures)
        key = load_public(public_half(other)) if other else public
        with pytest.raises(SignatureProblem):
            (checkpoint if other else forged).require_signer([key])


def test_a_cosignature_is_one_that_another_implementation_verifies() -> None:
    private = Ed25519PrivateKey.generate()
    key = WitnessKey("a.witness", private.public_key().public_bytes_raw())
    checkpoint = LogCheckpoint("a.log", 700, GROWN.root(700)).signed(new_private_key())
    line = cosign(checkpoint, key.name, private)
    vkey = Vkey.from_string(str(key))
    theirs = Checkpoint.from_text(f"{checkpoint}{line}")
    assert isinstance(vkey.get_verifier(), Ed25519CosignatureVerifier)
    theirs.verify(vkey)
    key.require(checkpoint, line)
    assert WitnessKey.parse(str(key)) == key
    with pytest.raises(SignatureProblem):
        key.require(LogCheckpoint("a.log", 699, checkpoint.root), line)
    with pytest.raises(SignatureProblem):
        WitnessKey("another", key.public).require(checkpoint, line)


@pytest.mark.parametrize(
    "text",
    ["", "a\n1\nAAAA\n\n", "a\nx\n\n", "a\n1\n!\n\n— a AAAAAAAA\n", "a\n1\nAAAA\n\n— a AAAAAAAA\n", "\n\n\n\n—"],
)
def test_what_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(SignatureProblem):
        LogCheckpoint.parse(text)


@pytest.mark.parametrize("text", ["", "a", "a+00000000+AAAA", "a+b+c+d", "a+zz+BAAA"])
def test_what_is_no_key_of_a_witness_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME\\+HASH\\+KEY"):
        WitnessKey.parse(text)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 512, 600])
def test_entries_are_read_as_they_are_written(size: int) -> None:
    files = entry_tiles(leaves(size))
    assert read_entries(size, files.__getitem__) == leaves(size)
    last = [*files][-1]
    for content, problem in ((files[last][:-1], "is damaged"), (files[last] + b"\0\1a", "has more than")):
        with pytest.raises(ValueError, match=problem):
            read_entries(size, (files | {last: content}).__getitem__)


def test_a_size_that_is_made_up_is_not_believed() -> None:
    files = entry_tiles(leaves(300))
    with pytest.raises(KeyError, match="tile/entries/001"):
        read_entries(10**30, files.__getitem__)
