"""An output directory's log in the form of public logs, with the text of the lines about some checkpoints alone.

checkpoint        its checkpoint, with the witness's cosignature where there is one: `note`
tile/0/000, …     the hashes of its Merkle tree: https://c2sp.org/tlog-tiles
tile/entries/…    its leaves: the sha256 of each line
entries.jsonl     the lines about some checkpoints
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.evidence.lines import MAX_BYTES, LogRecord, parse_line
from xray_runtime.kernel.evidence.log import COSIGNED, LOG, view
from xray_runtime.kernel.evidence.view import Published
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.trust.merkle import MerkleTree, entry_tiles, read_entries
from xray_runtime.trust.note import LogCheckpoint
from xray_runtime.trust.witness import WitnessProblem, read_log_checkpoint

if TYPE_CHECKING:
    from securesystemslib.signer import SSlibKey

CHECKPOINT, ENTRIES = "checkpoint", "entries.jsonl"
SOURCE = "source"
"""Directory of a bundle that has the log that it was exported from."""


def publish_log(output: Path, checkpoints: Collection[str], target: Path) -> None:
    """Write the log of `output`, with the lines about checkpoints (sha256), below `target`.

    Raises ConfigError: its checkpoint cannot be read.
    """
    if not view(output).heads:
        return
    try:
        checkpoint = read_log_checkpoint(output)
    except WitnessProblem as problem:
        raise ConfigError(f"--output: {str(output)!r} is not allowed: {problem}; `xray audit` says more") from None
    lines = read_bounded(output / LOG, MAX_BYTES).splitlines(keepends=True)[: checkpoint.size]
    leaves = [_leaf(line) for line in lines]
    tree = MerkleTree()
    for leaf in leaves:
        tree.add(leaf)
    with contextlib.suppress(WitnessProblem):
        cosigned = read_log_checkpoint(output, COSIGNED)
        checkpoint = cosigned if cosigned.body == checkpoint.body else checkpoint
    files = tree.tiles() | entry_tiles(leaves) | {CHECKPOINT: str(checkpoint).encode()}
    found = [line for number, line in enumerate(lines, 1) if _concerns(number, line, checkpoints)]
    for name, content in (files | {ENTRIES: b"".join(found)}).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)


def require_published(source: Path, checkpoint: str, keys: Sequence[SSlibKey]) -> None:
    """Raises ValueError unless the log below `source`, whose state one of `keys` signed, publishes a checkpoint (its
    sha256)."""
    try:
        state = LogCheckpoint.parse(read_bounded(source / CHECKPOINT, MAX_BYTES).decode())
        state.require_signer(keys)
        lines = read_bounded(source / ENTRIES, MAX_BYTES).splitlines(keepends=True)
        leaves = read_entries(state.size, lambda name: read_bounded(source / name, MAX_BYTES))
    except (OSError, ValueError) as error:
        raise ValueError(f"the log cannot be checked ({first_line(error)})") from None
    tree = MerkleTree()
    for leaf in leaves:
        tree.add(leaf)
    if tree.root(len(tree)) != state.root:
        raise ValueError("its entries are not those of its signed state")
    known = set(leaves)
    logged = [parse_line(n, line, LogRecord).entry for n, line in enumerate(lines) if _leaf(line) in known]
    if not any(isinstance(entry, Published) and entry.checkpoint == checkpoint for entry in logged):
        raise ValueError(f"the log does not publish {checkpoint[:12]}")


def _leaf(line: bytes) -> bytes:
    return hashlib.sha256(line).digest()


def _concerns(number: int, line: bytes, checkpoints: Collection[str]) -> bool:
    with contextlib.suppress(ValueError):
        return getattr(parse_line(number, line, LogRecord).entry, "checkpoint", None) in checkpoints
    return False
