"""A process that plays episodes of one environment: `python -m xray_runtime.agents.environments.worker`.

The protocol is JSON lines. The first line in is {"environment": "module:name", "path": [...], "memory_mb": n,
"parent": p}, where p is the reading end of a pipe of the parent; its answer is {"ready": true} or {"error": why}. Then

    {"id": n, "episode": k, "op": "reset", "task": {...}, "seed": s}    {"id": n, "start": {...}}
    {"id": n, "episode": k, "op": "step", "reply": text}                {"id": n, "step": {...}}
    {"id": n, "episode": k, "op": "close"}                              {"id": n, "closed": true}
    {"id": n, "op": "ping"}                                             {"id": n, "pong": true}

or {"id": n, "error": "TypeName: message"}. {"id": n, "began": true} announces a call of user code. Episodes run
concurrently, the requests of one in order: async methods on the event loop, others in threads. The process and its
forked children end when its stdin or that pipe closes.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

from xray_runtime.agents.environments.answer_checks import as_start, as_step
from xray_runtime.agents.worker_process import end_with, in_short, take_streams
from xray_runtime.methods.common.environment_protocol import Start, Step

OUTPUT_CHARS = 65_536
"""Limit of an answer: for the content of its messages, and for the rest of it as JSON."""
OUT_OF_MEMORY = 86
"""Exit code after running out of memory; any episode may be the cause."""
NO_THREAD = "can't start new thread"
"""Python's message if there is no memory for a thread's stack."""
THREADS = 64
"""Number of methods that are not async and run at the same time."""

USES: tuple[str, ...] = ()

Say = Callable[[dict[str, Any]], None]


@dataclass
class _Episode:
    environment: Any = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    failed: bool = False


class _EnvironmentWorker:
    """The episodes of this process."""

    def __init__(self, make: Callable[[], Any], say: Say) -> None:
        self._make, self._say = make, say
        self._episodes: dict[int, _Episode] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, request: dict[str, Any]) -> None:
        """Start to answer a request; called on the event loop."""
        if request["op"] == "ping":
            self._say({"id": request["id"], "pong": True})
            return
        # The loop does not keep tasks alive.
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: dict[str, Any]) -> None:
        id, key = request["id"], request["episode"]
        episode = self._episodes.setdefault(key, _Episode())
        async with episode.lock:
            try:
                self._say({"id": id} | await self._do(request, episode))
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            except BaseException as error:  # SystemExit of user code too
                if str(error) == NO_THREAD:
                    os._exit(OUT_OF_MEMORY)
                episode.failed = True
                self._say({"id": id, "error": in_short(error)})
            if request["op"] == "close":
                del self._episodes[key]

    async def _do(self, request: dict[str, Any], episode: _Episode) -> dict[str, Any]:
        def begin() -> None:
            self._say({"id": request["id"], "began": True})

        match request["op"]:
            case "reset":
                episode.environment = await _call(self._make, begin=begin)
                start = as_start(await _call(episode.environment.reset, request["task"], request["seed"]))
                return {"start": _limited(start)}
            case "step":
                if episode.failed or episode.environment is None:
                    raise RuntimeError("a request of this episode before this one failed")
                return {"step": _limited(as_step(await _call(episode.environment.step, request["reply"], begin=begin)))}
        close = getattr(episode.environment, "close", None)
        if close is not None:
            await _call(close, begin=begin)
        return {"closed": True}


async def _call(function: Callable[..., Any], *arguments: Any, begin: Callable[[], None] = lambda: None) -> Any:
    """Call `function`, on the event loop if it is async, else in a thread."""
    if inspect.iscoroutinefunction(function):
        begin()
        return await function(*arguments)

    def call() -> tuple[Any, BaseException | None]:
        begin()
        try:
            return function(*arguments), None
        except BaseException as error:  # a future cannot hold StopIteration
            return None, error

    value, error = await asyncio.to_thread(call)
    if error is not None:
        raise error
    return await value if inspect.isawaitable(value) else value


def _limited(answer: Start | Step) -> dict[str, Any]:
    """`answer` as JSON. Raises ValueError if it exceeds `OUTPUT_CHARS`."""
    values, messages = asdict(answer), answer.messages or []
    content = sum(len(message["content"]) for message in messages)
    more = [{name: value for name, value in m.items() if name not in ("role", "content")} for m in messages]
    rest = len(json.dumps(values | {"messages": [part for part in more if part]}))
    for name, length in (("the content of the messages", content), ("the answer without its messages", rest)):
        if length > OUTPUT_CHARS:
            raise ValueError(f"{name} has {length:,} characters; at most {OUTPUT_CHARS:,} are allowed")
    return values


def _load(name: str) -> Callable[[], Any]:
    """The class or function at an import path. Raises ValueError if it is neither, or a class without `reset` or
    `step`."""
    module, _, attribute = name.partition(":")
    make: Callable[[], Any] = getattr(importlib.import_module(module), attribute)
    if not callable(make):
        raise ValueError(f"{name} is {make!r}: must be a class, or a function that returns an environment")
    for method in ("reset", "step"):
        if isinstance(make, type) and not callable(getattr(make, method, None)):
            raise ValueError(f"{name} has no method {method!r}")
    return make


def _end() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


async def _serve(make: Callable[[], Any], requests: BinaryIO, say: Say) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    worker = _EnvironmentWorker(make, say)

    def read() -> None:
        try:
            for line in requests:
                loop.call_soon_threadsafe(worker.take, json.loads(line))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        finally:
            _end()

    # In a thread, so that an environment that blocks the loop does not delay reading.
    threading.Thread(target=read, daemon=True).start()
    say({"ready": True})
    await asyncio.Event().wait()


def main() -> None:
    output, source = take_streams()
    answers, requests = os.fdopen(output, "w", encoding="utf-8"), os.fdopen(source, "rb")
    lock = threading.Lock()

    def say(answer: dict[str, Any]) -> None:
        line = json.dumps(answer) + "\n"
        with lock:
            answers.write(line)
            answers.flush()

    first = json.loads(requests.readline())
    if os.getpgrp() == os.getpid():
        end_with(first["parent"])
    sys.path[:] = first["path"]
    size = first["memory_mb"] * 2**20
    try:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        make = _load(first["environment"])
    except BaseException as error:  # SystemExit of a module too
        say({"error": in_short(error)})
        return
    asyncio.run(_serve(make, requests, say))


if __name__ == "__main__":
    main()
