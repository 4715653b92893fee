"""An output directory's log in the form of public logs, with the text of the lines about some checkpoints alone.

checkpoint        its checkpoint, with the witness's cosignature where there is one: `note`
tile/0/000, …     the hashes of its Merkle tree: https://c2sp.org/tlog-tiles
tile/entries/…    its leaves: the sha256 of each line
entries.jsonl     the lines about some checkpoints
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection
from pathlib import Path

from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.evidence.lines import MAX_BYTES, LogRecord, parse_line
from xray_runtime.kernel.evidence.log import COSIGNED, LOG, view
from xray_runtime.kernel.store.checkpoints import read_bounded
from xray_runtime.trust.merkle import MerkleTree, entry_tiles
from xray_runtime.trust.witness import WitnessProblem, read_log_checkpoint

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
    leaves = [hashlib.sha256(line).digest() for line in lines]
    tree = MerkleTree()
    for leaf in leaves:
        tree.add(leaf)
    with contextlib.suppress(WitnessProblem):
        cosigned = read_log_checkpoint(output, COSIGNED)
        checkpoint = cosigned if cosigned.body == checkpoint.body else checkpoint
    files = tree.tiles() | entry_tiles(leaves) | {"checkpoint": str(checkpoint).encode()}
    found = [line for number, line in enumerate(lines, 1) if _concerns(number, line, checkpoints)]
    for name, content in (files | {"entries.jsonl": b"".join(found)}).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)


def _concerns(number: int, line: bytes, checkpoints: Collection[str]) -> bool:
    with contextlib.suppress(ValueError):
        return getattr(parse_line(number, line, LogRecord).entry, "checkpoint", None) in checkpoints
    return False
