"""Seeds: every random choice derives from the config's seed and the names of its consumer."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed in [0, 2³¹) that depends only on `seed` and on each of `names`.

    Consumers that differ in one name (stage, role, iteration, row) draw from unrelated streams, on every machine.
    """
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
