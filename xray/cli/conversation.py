"""Shared by the commands in which people read what models say: options, and text that is safe on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

if TYPE_CHECKING:
    from xray_runtime.methods.lifecycle import LifecycleConfig
    from xray_runtime.trust.audit.checkpoints import Audit

Temperature = Annotated[float | None, typer.Option(help="Sampling temperature. Default: the evaluation's.")]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Longest reply in tokens. Default: the evaluation's.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random draws.")]


def sampling_of(config: LifecycleConfig, temperature: float | None, max_new_tokens: int | None) -> tuple[float, int]:
    """(temperature, longest reply in tokens), by default those of the evaluation.

    Raises:
        ConfigError: the temperature is not above 0.
    """
    from xray_runtime.kernel.config.validation import ConfigError

    if temperature is not None and not 0 < temperature < float("inf"):
        raise ConfigError(f"--temperature: {temperature:g} is not allowed: must be greater than 0")
    return temperature or config.evaluate.temperature, max_new_tokens or config.evaluate.max_new_tokens


def audit_summary(result: Audit) -> Text:
    """An audit in one line."""
    from xray_runtime.kernel.history.render import printable

    if result.is_sound:
        return Text(f"audit: sound, {result.checkpoints} checkpoints, {result.files} files", style="green")
    first = next(finding for finding in result.findings if finding.is_broken)
    text = f"audit: NOT SOUND: {first.code}: {first.subject}: {first.detail}"
    return Text(f"{printable(text)}; `xray audit` shows everything", style="bold red")


def shown(text: str) -> str:
    """A model's text without control characters that could move the cursor or colour the terminal."""
    from xray_runtime.kernel.history.render import printable

    return "\n".join(printable(line) for line in text.split("\n"))


def typed(line: str) -> str:
    """A line of input without its newline; bytes that are not text become "?"."""
    return line.removesuffix("\n").encode("utf-8", "replace").decode()


def judges_text(judges: Mapping[str, int]) -> str:
    """How many judgements each person gave."""
    return ", ".join(f"{shown(name)} {number}" for name, number in judges.items())
