"""Answers of untrusted HTTP servers: read as they arrive, up to a size and a time, never decompressed.

A few kilobytes can decompress to gigabytes, in more layers than one. So every client asks for the plain answer, and
refuses any other.
"""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import httpx

PLAIN = {"Accept-Encoding": "identity"}
"""Header of every request."""
MAX_ANSWER_BYTES = 2**24

certificates = cache(httpx.create_ssl_context)
"""Shared by all clients, since making it reads all certificates."""


class AnswerError(httpx.HTTPError):
    """The answer is not valid, or the server could not answer now."""


def read(response: httpx.Response, within_s: float) -> bytes:
    """The body of a streamed response.

    Raises:
        AnswerError: it is compressed or too long.
        httpx.HTTPError: it breaks off, or takes longer than `within_s`.
    """
    _check_plain(response)
    content, end = bytearray(), time.monotonic() + within_s
    for part in response.iter_raw():
        content += part
        _check_size(content)
        if time.monotonic() > end:
            raise httpx.ReadTimeout(f"no complete answer within {within_s:g} s")
    return bytes(content)


async def read_async(response: httpx.Response) -> bytes:
    """`read` on an event loop, whose task has a time limit."""
    _check_plain(response)
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        _check_size(content)
    return bytes(content)


def parsed(content: bytes) -> Any:
    """The JSON of an answer. Raises AnswerError if it is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise AnswerError(f"the answer is not JSON: {beginning(content)}") from error


def beginning(content: bytes) -> str:
    """The start of an answer in one line."""
    return " ".join(content[:200].decode("utf-8", "replace").split())


def _check_plain(response: httpx.Response) -> None:
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise AnswerError(f"the answer has Content-Encoding {encoding[:50]!r}: must have none")


def _check_size(content: bytearray) -> None:
    if len(content) > MAX_ANSWER_BYTES:
        raise AnswerError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
