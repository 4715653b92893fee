"""The files of a comparison, which `live.feedback.session` writes, an audit checks and a withdrawal rewrites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xray_runtime.kernel.store.identity import digest

SESSIONS = "feedback"
"""Below the output directory; each comparison has a directory in it."""
SESSION, REPLIES, JUDGEMENTS = "session.json", "replies.jsonl", "judgements.jsonl"


def comparison_name(setup: Mapping[str, Any]) -> str:
    """The name of the directory of a comparison; `setup` is the content of its SESSION."""
    return digest(setup)[:12]
