"""The parts of its training rollouts that a stage keeps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from xray_runtime.kernel.config.section import Section


def _kept(value: Any) -> Any:
    if value in ("all", "none") or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"{value!r} is not allowed: must be 'all', 'none' or a number of iterations, at least 1")


class LedgerConfig(Section):
    """The training rollouts that a checkpoint keeps."""

    keep: Annotated[Literal["all", "none"] | int, BeforeValidator(_kept)] = "all"
    """Keep the rollouts of `all` iterations, of `none`, or of this many last iterations."""
    tokens: Literal["kept", "hashed"] = "kept"
    """`hashed`: store only salted digests of prompts, replies and per-token numbers, for private chats."""
