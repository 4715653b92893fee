"""Further evidence for or against promoting a candidate: one object, `CHECK`, in a module of `promotion_checks`.

Packages of others name theirs under the entry point `xray.promotion_checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from xray_runtime.kernel.history.graph import Node
from xray_runtime.kernel.history.reference import LineageStore
from xray_runtime.kernel.plugs import Registry


class Gate(BaseModel):
    """One gate and its result."""

    name: str
    passed: bool
    reason: str


@dataclass(frozen=True)
class PromotionCheck:
    """One check."""

    refusal: Callable[[LineageStore, Node], str | None] | None = None
    """One line on why a model must not be promoted or served; None if nothing speaks against it."""
    canary_gate: Callable[[Path, str, str, Path | None], Gate | None] | None = None
    """The gate for (output, candidate, champion, public key) where bounds ask for a canary; None: there was none."""


CHECKS = Registry[PromotionCheck](
    "promotion check", "xray_runtime.live.promotion_checks", "CHECK", "xray.promotion_checks"
)


def refusals(store: LineageStore, node: Node) -> Iterator[str]:
    """Why a model must not be promoted or served."""
    for check in map(CHECKS.get, CHECKS):
        if check.refusal is not None and (reason := check.refusal(store, node)) is not None:
            yield reason


def canary_gates(output: Path, candidate: str, champion: str, public: Path | None) -> Iterator[Gate]:
    """The gates about a candidate's canary beside the champion."""
    for check in map(CHECKS.get, CHECKS):
        if (
            check.canary_gate is not None
            and (gate := check.canary_gate(output, candidate, champion, public)) is not None
        ):
            yield gate
