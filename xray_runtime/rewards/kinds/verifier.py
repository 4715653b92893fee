"""Built-in verifiers: mathematics, patterns, JSON, code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from xray_runtime.rewards.kind import ExternalTerm
from xray_runtime.rewards.source import Source
from xray_runtime.rewards.term import Recording
from xray_runtime.rewards.verifier_config import Verifier

LIMITS = {"limit_s", "memory_mb"}
"""Fields that do not distinguish verifiers."""


class VerifierTerm(ExternalTerm, field="verifier", recording=Recording.COMPUTED):
    """1 or 0."""

    verifier: Annotated[Verifier, Field(discriminator="kind")]

    @property
    def name(self) -> str:
        return self.verifier.kind

    @property
    def columns(self) -> dict[str, str]:
        column = self.verifier.column
        return super().columns | ({} if column is None else {"verifier.column": column})

    @classmethod
    def identity(cls, fields: Mapping[str, Any]) -> Any:
        given = fields["verifier"].items()
        return {name: value for name, value in given if name not in LIMITS and value is not None}

    def open(self, where: str, functions: Mapping[str, Callable[..., Any]]) -> Source:
        from xray_runtime.rewards.verifiers import VerifierSource

        return VerifierSource(self.verifier, f"{where}.verifier", self.when)


TERM = VerifierTerm
