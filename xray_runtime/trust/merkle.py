"""The Merkle tree over the lines of the signed log, with its proofs and tiles.

Leaf i is the sha256 (32 bytes) of line i. Hashes and proofs are those of RFC 6962 (section 2.1), tiles those of
https://c2sp.org/tlog-tiles. Complete subtrees are kept, so a root or a proof takes a logarithm of the size.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Sequence

TILE = 256
"""Hashes in a full tile."""


def _leaf(content: bytes) -> bytes:
    return hashlib.sha256(b"\0" + content).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _split(size: int) -> int:
    """The largest power of two below `size`."""
    return 1 << (size - 1).bit_length() - 1


class MerkleTree:
    """A tree that grows. A `size` below its own asks about the tree that it was then."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        self._levels: list[list[bytes]] = [[]]
        """Hash of the complete subtree of 2^k leaves that starts at leaf j·2^k, at [k][j]."""
        for leaf in leaves:
            self.add(leaf)

    def __len__(self) -> int:
        return len(self._levels[0])

    def add(self, leaf: bytes) -> None:
        self._levels[0].append(_leaf(leaf))
        level = 0
        while len(self._levels[level]) % 2 == 0:
            if len(self._levels) == level + 1:
                self._levels.append([])
            self._levels[level + 1].append(_node(*self._levels[level][-2:]))
            level += 1

    def follow(self, leaves: Sequence[str]) -> None:
        """Become the tree over these leaves (hex), adding only those after the last that is known."""
        known = len(self)
        if known > len(leaves) or (known and self._levels[0][-1] != _leaf(bytes.fromhex(leaves[known - 1]))):
            self._levels, known = [[]], 0
        for leaf in leaves[known:]:
            self.add(bytes.fromhex(leaf))

    def root(self, size: int) -> bytes:
        return self._hash(0, size)

    def consistency(self, old: int, size: int) -> list[bytes]:
        """The proof that the tree of `old` leaves is the beginning of that of `size`; empty where `old` is 0."""
        proof, start, end, is_complete = list[bytes](), 0, size, True
        while 0 < old < end:
            middle = start + _split(end - start)
            if old <= middle:
                proof.append(self._hash(middle, end))
                end = middle
            else:
                proof.append(self._hash(start, middle))
                start, is_complete = middle, False
        return [*([] if is_complete or old == 0 else [self._hash(start, end)]), *proof[::-1]]

    def tiles(self) -> dict[str, bytes]:
        """Path → content of every tile of this tree; the last one of a level is partial unless it is full."""
        found = dict[str, bytes]()
        for level, hashes in enumerate(self._levels[::8]):
            found |= _tiles(str(level), hashes)
        return found

    def _hash(self, start: int, end: int) -> bytes:
        """The hash of the subtree over these leaves, which begins where one of its size may."""
        size = end - start
        if size == 0:
            return hashlib.sha256().digest()
        if size & (size - 1) == 0:
            return self._levels[size.bit_length() - 1][start // size]
        middle = start + _split(size)
        return _node(self._hash(start, middle), self._hash(middle, end))


def is_consistent(old: int, old_root: bytes, size: int, root: bytes, proof: Sequence[bytes]) -> bool:
    """Whether a proof shows that the tree with `old_root` is the beginning of the other (RFC 9162, section 2.1.4.2)."""
    if old == 0 or old >= size:
        return not proof and old <= size and (old < size or old_root == root)
    path = [old_root, *proof] if old & (old - 1) == 0 else list(proof)
    # Bytes moved from one side of a node to the other would give the same hash.
    if not path or any(len(sibling) != len(root) for sibling in path):
        return False
    number, last = old - 1, size - 1
    while number & 1:
        number, last = number >> 1, last >> 1
    first = second = path[0]
    for sibling in path[1:]:
        if last == 0:
            return False
        if number & 1 or number == last:
            first, second = _node(sibling, first), _node(sibling, second)
            while number and not number & 1:
                number, last = number >> 1, last >> 1
        else:
            second = _node(second, sibling)
        number, last = number >> 1, last >> 1
    return last == 0 and first == old_root and second == root


def entry_tiles(leaves: Sequence[bytes]) -> dict[str, bytes]:
    """Path → content of the tiles that list the leaves themselves."""
    return _tiles("entries", [len(leaf).to_bytes(2) + leaf for leaf in leaves])


def read_entries(size: int, read: Callable[[str], bytes]) -> list[bytes]:
    """The leaves of a tree of `size` from its tiles of entries; `read`: the content of a path. Raises ValueError where
    a tile is not one of those."""
    leaves: list[bytes] = []
    # One by one: a size that somebody made up ends at the first tile that is not there.
    for start in range(0, size, TILE):
        count = min(TILE, size - start)
        name = _tile("entries", start, count)
        content = io.BytesIO(read(name))
        for _ in range(count):
            length = int.from_bytes(content.read(2))
            leaf = content.read(length)
            if not length or len(leaf) < length:
                raise ValueError(f"{name} is damaged")
            leaves.append(leaf)
        if content.read(1):
            raise ValueError(f"{name} has more than {count} entries")
    return leaves


def _tiles(level: str, parts: Sequence[bytes]) -> dict[str, bytes]:
    found = dict[str, bytes]()
    for start in range(0, len(parts), TILE):
        content = parts[start : start + TILE]
        found[_tile(level, start, len(content))] = b"".join(content)
    return found


def _tile(level: str, start: int, count: int) -> str:
    """The path of the tile with `count` hashes or entries from `start`."""
    partial = "" if count == TILE else f".p/{count}"
    return f"tile/{level}/{_number(start // TILE)}{partial}"


def _number(number: int) -> str:
    """1234067 is x001/x234/067."""
    last = f"{number % 1000:03d}"
    while number := number // 1000:
        last = f"x{number % 1000:03d}/{last}"
    return last
