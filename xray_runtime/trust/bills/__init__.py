"""Public forms that a bundle has: bills of material, lineage events, and a draft for the EU AI Act.

Each module writes one form from the same `History`. All repeat the signed statements; a fact that no record has is left
out, or marked where a person has to write it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from xray_runtime.trust.bills import annexes, croissant, cyclonedx, openlineage, spdx
from xray_runtime.trust.bills.history import History

BILLS: dict[str, Callable[[History], bytes]] = {
    "bom.cdx.json": cyclonedx.write,
    "bom.spdx.json": spdx.write,
    "openlineage.jsonl": openlineage.write,
    "ai-act.md": annexes.write,
}
"""File → what writes it."""
CROISSANT = "croissant"
"""Folder with a file for each dataset."""


def write_bills(history: History, target: Path) -> None:
    """Write all forms. Raises OSError, ValueError: a statement cannot be read."""
    files = {name: write(history) for name, write in BILLS.items()}
    files |= {f"{CROISSANT}/{name}": content for name, content in croissant.write_all(history).items()}
    for name, content in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(content)
