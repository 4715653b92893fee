"""Requests to a server, limited in time, size and number, with retries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from xray_runtime.kernel.bounded_http import PLAIN, AnswerError, beginning, certificates, parsed, read_async
from xray_runtime.kernel.credentials import key_header
from xray_runtime.rewards.source import Score, described, failure

if TYPE_CHECKING:
    from xray_runtime.rewards.kinds._remote import RemoteConfig

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PAUSE_S = 60.0
WORTH_ANOTHER_TRY = (408, 425, 429)
"""Statuses below 500 that are worth a retry; all others mean that the request is wrong."""


class RefusedRequestError(Exception):
    """The server refuses the request, so a retry is useless."""


def ask_all(config: RemoteConfig, path: str, requests: Sequence[Any], read: Callable[[int, Any], T]) -> list[T | Score]:
    """POST each request as JSON; returns `read(number, answer)` of each, or a failed score after the retries.

    Args:
        path: below `config.url`.
        read: raises AnswerError if an answer is not valid, for another try.
    """
    url, free = config.url.rstrip("/") + path, asyncio.Semaphore(config.concurrency)

    async def ask(client: httpx.AsyncClient, number: int, request: Any) -> T | Score:
        async with free:
            for attempt in range(config.retries + 1):
                if attempt:
                    await asyncio.sleep(min(config.backoff_s * 2 ** (attempt - 1), MAX_PAUSE_S))
                try:
                    answer = await asyncio.wait_for(post(client, url, request), config.timeout_s)
                    return read(number, answer)
                except TimeoutError:
                    error: Exception = TimeoutError(f"{url}: no answer within timeout_s = {config.timeout_s:g}")
                except RefusedRequestError as refused:
                    return failure(described(refused))
                except httpx.HTTPError as failed:
                    error = type(failed)(f"{url}: {failed or described(failed)}")
                log.warning("attempt %d of %d: %s", attempt + 1, config.retries + 1, described(error))
            return failure(described(error))

    async def ask_each() -> list[T | Score]:
        # httpx only limits single reads, hence the limit above.
        headers = key_header(config.url) | PLAIN
        async with httpx.AsyncClient(headers=headers, timeout=config.timeout_s, verify=certificates()) as client:
            return list(await asyncio.gather(*(ask(client, *one) for one in enumerate(requests))))

    return asyncio.run(ask_each())


async def post(client: httpx.AsyncClient, url: str, request: Any) -> Any:
    """The JSON that answers a request.

    Raises:
        AnswerError: it is not JSON, compressed or too long, or the server cannot answer now.
        RefusedError: the server says that the request is wrong.
        httpx.HTTPError: there is no answer.
    """
    async with client.stream("POST", url, json=request) as response:
        content = await read_async(response)
    status = response.status_code
    if status >= 500 or status in WORTH_ANOTHER_TRY:
        raise AnswerError(f"status {status} {beginning(content)}")
    if not response.is_success:
        raise RefusedRequestError(f"{url}: status {status} {beginning(content)}")
    return parsed(content)
