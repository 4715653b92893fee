"""256 agents that sleep between calls: our gateway beside vLLM's own OpenAI server, in turns in one run.

    python -m benchmarks.gateway [--agents 256] [--turns 4] [--repeats 3]

Each agent asks, sleeps 10 to 500 ms and goes on with what it was answered; replies have 1 to 32 tokens. The clients are
the same, in a process of their own. Behind the gateway is the generator of a stage, and every call is journaled. The
generator's idle share is that of the time in which it had no call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ray

from benchmarks.episodes import NEW_TOKENS, STOP_EVERY, Trace, TracedGenerator
from benchmarks.generation import fresh_model
from benchmarks.machine import line, machine, spread, start_ray, table
from benchmarks.serving import running
from xray.deployments.service import free_port
from xray_runtime.agents.episode import AgentEpisode, EpisodeLimits, Policy
from xray_runtime.agents.gateway import Gateway
from xray_runtime.agents.segments import Call
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.rows import Rows
from xray_runtime.engines.generation.sampling import Sampling
from xray_runtime.engines.generation.vllm import environment
from xray_runtime.engines.generation.vllm_server import arguments
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.processes import kill_tagged, start_reaper
from xray_runtime.rewards.journal import Journal
from xray_runtime.seeding import derive_seed
from xray_runtime.workers.generator_spec import GeneratorSpec
from xray_runtime.workers.opening import model_opener
from xray_runtime.workers.protocols import get

CONTEXT, TRIES = 512, 3
FASTEST_S, SLOWEST_S = 0.01, 0.5
RUNTIME = RuntimeConfig(device="cpu")
VLLM, GATEWAY = "vLLM's server", "gateway"


@dataclass(frozen=True)
class Round:
    """One turn of all agents."""

    tokens_per_s: float
    seconds: float
    idle_share: float | None = None


async def asked_once(client: httpx.AsyncClient, url: str, body: Any, headers: dict[str, str]) -> Any:
    """An answer; a connection that breaks is tried again, as SDKs do."""
    for count in range(TRIES):
        try:
            answer = await client.post(url, json=body, headers=headers | {"x-stainless-retry-count": str(count)})
            answer.raise_for_status()
            return answer.json()
        except httpx.TransportError:
            if count == TRIES - 1:
                raise


async def play(client: httpx.AsyncClient, number: int, address: str, key: str, turns: int, more: Any) -> int:
    """Tokens that one agent was answered."""
    draw, num_tokens = random.Random(number), 0
    messages = [{"role": "user", "content": f"hello {number}"}]
    for turn in range(turns):
        await asyncio.sleep(draw.uniform(FASTEST_S, SLOWEST_S))
        body = {"model": "model", "messages": messages, "max_tokens": NEW_TOKENS, "seed": 1000 * number + turn} | more
        found = await asked_once(client, f"{address}/v1/chat/completions", body, {"authorization": f"Bearer {key}"})
        num_tokens += found["usage"]["completion_tokens"]
        said = {"role": "assistant", "content": found["choices"][0]["message"]["content"] or ""}
        messages += [said, {"role": "user", "content": "go on"}]
    return num_tokens


async def clients(given: dict[str, Any]) -> tuple[int, float]:
    """(tokens, seconds) of all agents at the same time."""
    limits = httpx.Limits(max_connections=len(given["addresses"]))
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        begin = time.perf_counter()
        agents = enumerate(given["addresses"])
        played = (play(client, n, address, key, given["turns"], given["more"]) for n, (address, key) in agents)
        found = await asyncio.gather(*played)
    return sum(found), time.perf_counter() - begin


def asked(addresses: list[tuple[str, str]], turns: int, more: dict[str, Any]) -> Round:
    """What `clients` measures in a process of its own."""
    given = json.dumps({"addresses": addresses, "turns": turns, "more": more})
    command = [sys.executable, "-m", "benchmarks.gateway", "--clients"]
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the clients failed:\n{done.stderr[-2000:]}")
    num_tokens, seconds = json.loads(done.stdout)
    return Round(num_tokens / seconds, seconds)


class Ours:
    """A gateway over the generator of a stage."""

    def __init__(self, generator: Any, model: Path, scratch: Path) -> None:
        self._traced, self._model = TracedGenerator(generator), model
        self._journal, self._count = Journal(scratch), 0

    @contextmanager
    def _opened(self, num_agents: int) -> Iterator[list[tuple[str, str]]]:
        """Address and key of each agent."""
        tokenizer = load_tokenizer(self._model)
        stops = stops_of(tokenizer)
        self._count += 1
        with Gateway(self._generate) as gateway:
            policy = Policy(
                chat_format(tokenizer),
                lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
                gateway.sampler,
                Sampling(NEW_TOKENS, 1.0, stops, tokenizer.pad_token_id),
                0,
                partial(derive_seed, self._count),
                self._keep,
            )
            limits = EpisodeLimits(max_calls=64, max_sampled_tokens=4096, context=CONTEXT, leave_out=False)
            episodes = [AgentEpisode(f"{self._count}-{n}", policy, limits, {}) for n in range(num_agents)]
            for episode in episodes:
                gateway.open(episode)
            try:
                yield [(gateway.url(episode), episode.secret) for episode in episodes]
            except RuntimeError as error:
                raise gateway.sampler.failure or error from error

    def _generate(self, rows: Rows, sampling: Sampling, version: int) -> Rows:
        return get(self._traced.generate.remote(rows, sampling, version))

    def _keep(self, calls: Iterable[Call]) -> None:
        entries = [{"key": call.key, "source": "agent", "step": 0, "call": asdict(call)} for call in calls]
        self._journal.write_entries(0, entries)

    def turn(self, num_agents: int, turns: int) -> Round:
        self._traced.trace = trace = Trace()
        with self._opened(num_agents) as addresses:
            found = asked(addresses, turns, {})
        trace.seconds = found.seconds
        return Round(found.tokens_per_s, found.seconds, trace.idle_share)


def stops_of(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a reply."""
    return (tokenizer.eos_token_id, *range(STOP_EVERY, len(tokenizer), STOP_EVERY))


def measured(directory: Path, num_agents: int, turns: int, repeats: int) -> dict[str, list[Round]]:
    """The rounds of both, in turns, each pair in the other order than the one before."""
    model = fresh_model(directory / "model")
    (directory / "journal").mkdir()
    more = {"stop_token_ids": list(stops_of(load_tokenizer(model))), "temperature": 1.0}
    port = free_port()
    plain = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log", "--model"]
    plain += arguments(model, ["model"], "0", RUNTIME, "cpu", tensor_parallel=1)
    settings = environment("cpu") | {"OMP_NUM_THREADS": str(RUNTIME.threads)}
    found: dict[str, list[Round]] = {VLLM: [], GATEWAY: []}
    with ExitStack() as stack:
        log = directory / "vllm.log"
        server = stack.enter_context(running([*plain, "--port", str(port)], port, log, settings))
        opener = model_opener(RUNTIME, directory / "logs", "benchmark")
        models = stack.enter_context(opener({"generator": GeneratorSpec(model, CONTEXT)}))
        ours = Ours(models["generator"], model, directory / "journal")
        for repeat in range(-1, repeats):
            for name in (VLLM, GATEWAY) if repeat % 2 else (GATEWAY, VLLM):
                if name == VLLM:
                    seen = asked([(server.address, "none")] * num_agents, turns, more)
                else:
                    seen = ours.turn(num_agents, turns)
                print(f"{name}: {seen}", file=sys.stderr, flush=True)
                if repeat >= 0:  # the first pair warms up
                    found[name].append(seen)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients:
        print(json.dumps(asyncio.run(clients(json.load(sys.stdin)))))
        return
    mark, about = start_reaper(), machine()
    start_ray(num_cpus=2)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), options.agents, options.turns, options.repeats)
    ray.shutdown()
    print(
        f"{about}; {options.agents} agents, {options.turns} calls each, {options.repeats} repeats; load at the end ",
        end="",
    )
    print(f"{os.getloadavg()[0]:.1f}\n")
    table(("", "tokens/s", f"÷ {VLLM}", "seconds", "generator idle, %"), [])
    for name, rounds in found.items():
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(rounds, found[VLLM], strict=True)]
        idle = [100 * seen.idle_share for seen in rounds if seen.idle_share is not None]
        speeds = spread(seen.tokens_per_s for seen in rounds)
        line((name, speeds, spread(ratios, "×"), spread(seen.seconds for seen in rounds), spread(idle) if idle else ""))
    kill_tagged(mark)


if __name__ == "__main__":
    main()
