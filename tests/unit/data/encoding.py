"""Replies as token ids, and chat templates as models ship them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xray_runtime.data.pairs import reply_message
from xray_runtime.data.template_text import USER_TURN
from xray_runtime.data.tokenizing import encode_replies_to


def encode_replies(tokenizer: Any, replies: Sequence[str]) -> list[list[int]]:
    """Each text as a reply to a user's message, with the end of its turn."""
    return encode_replies_to(tokenizer, [([USER_TURN], reply_message(reply)) for reply in replies])


def template(name: str) -> str:
    """The text of a file in `templates`."""
    return (Path(__file__).with_name("templates") / f"{name}.jinja").read_text(encoding="utf-8")
