"""A thousand episodes of a slow environment at the same time: does the generator wait for them?

    python -m benchmarks.episodes [--episodes 64 1000] [--repeats 3]

Each answer of the environment takes 10 to 500 ms, drawn by its seed; an episode has four turns. Every rollout goes
through what a PPO stage uses (episodes, worker processes, the journal, a WholeModel with vLLM). Beside it, in turns,
vLLM's own `generate` on the same prompts and seeds, with nothing between two calls: what the turns cost without
environments.

When the generator was called and answered, and when environments were asked and answered, is noted as it happens.
From that: the share of the time that no call was at the generator, and of the environments' answers the share that
came while it had none. Memory: the largest resident set, as the kernel counts it, of this process and of any worker.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import tempfile
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from benchmarks import slow_game
from benchmarks.generation import fresh_model
from benchmarks.machine import line, machine, spread, start_ray, table
from xray_runtime.config.environment import EnvironmentConfig
from xray_runtime.config.ppo import PPOConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.rows import Rows
from xray_runtime.engines.generation.sampling import EngineRank, Sampling
from xray_runtime.environments import worker
from xray_runtime.environments.pool import EnvironmentPool
from xray_runtime.environments.protocol import Start, Step
from xray_runtime.graph.kind import Stage
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.processes import kill_tagged, start_reaper
from xray_runtime.rl.episode import EpisodeBatch
from xray_runtime.rl.episodes import Episodes
from xray_runtime.workers.generator_spec import GeneratorSpec
from xray_runtime.workers.libraries import REPRODUCIBLE, SPIN_COUNT
from xray_runtime.workers.opening import model_opener
from xray_runtime.workers.protocols import Ready

NEW_TOKENS, MAX_PROMPT, MAX_TOKENS = 32, 32, 256
STOP_EVERY = 8
"""Each such token of the vocabulary ends a turn: a model that has learned nothing says eight tokens at a time."""
WARM_UP = 32
RUNTIME = RuntimeConfig(device="cpu")
CASES = {
    "1 cohort": (1, slow_game.OnLoop),
    "2 cohorts": (2, slow_game.OnLoop),
    "4 cohorts": (4, slow_game.OnLoop),
    "2 cohorts, methods not async": (2, slow_game.InThreads),
}


@dataclass(frozen=True)
class Call:
    """A turn of a cohort: what was sampled for, when it was asked for and when it was there."""

    rows: Rows
    start: float
    end: float


@dataclass
class Trace:
    """What happened in one rollout."""

    begin: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    calls: list[Call] = field(default_factory=list)
    """Of the generator."""
    answers: list[float] = field(default_factory=list)
    """When environments answered."""

    def busy(self) -> list[tuple[float, float]]:
        """When some call was at the generator, as intervals that do not touch."""
        merged: list[tuple[float, float]] = []
        for call in sorted(self.calls, key=lambda call: call.start):
            if merged and call.start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(call.end, merged[-1][1])
            else:
                merged.append((call.start, call.end))
        return merged

    @property
    def idle_share(self) -> float:
        """Share of the time in which no call was at the generator."""
        return 1 - sum(end - start for start, end in self.busy()) / self.seconds

    @property
    def idle_answers(self) -> float:
        """Share of the environments' answers that came while no call was at the generator."""
        busy = self.busy()
        return float(np.mean([not any(start <= at < end for start, end in busy) for at in self.answers]))


class TracedGenerator:
    """A generator that notes when it is asked and answers. A cohort has a thread of its own, which waits here."""

    def __init__(self, generator: Any) -> None:
        self._generator, self.generate, self.trace = generator, self, Trace()

    def remote(self, rows: Rows, sampling: Sampling, version: int) -> Ready[Rows]:
        start = time.perf_counter()
        answer: Rows = ray.get(self._generator.generate.remote(rows, sampling, version))
        self.trace.calls.append(Call(rows, start, time.perf_counter()))
        return Ready(answer)


class TracedPool(EnvironmentPool):
    """A pool that notes when environments answer."""

    trace: Trace

    def reset(self, *arguments: Any) -> Future[Start]:
        return self._traced(super().reset(*arguments))

    def step(self, *arguments: Any) -> Future[Step]:
        return self._traced(super().step(*arguments))

    def _traced(self, future: Future[Any]) -> Future[Any]:
        trace = self.trace
        future.add_done_callback(lambda _: trace.answers.append(time.perf_counter()))
        return future


class BareEngine:
    """vLLM in a process of its own, with a generator's settings."""

    def __init__(self, directory: Path) -> None:
        import torch

        from xray_runtime.engines.generation.vllm import VLLMSampler

        torch.set_num_threads(RUNTIME.threads)
        self._sampler = VLLMSampler(directory, MAX_PROMPT + MAX_TOKENS, RUNTIME, EngineRank("cpu"))

    def play(self, turns: list[Rows], stops: tuple[int, ...]) -> float:
        """Seconds that `LLM.generate` takes for all of the turns."""
        llm, params = self._sampler._llm, self._sampler._vllm.SamplingParams
        options = {"max_tokens": NEW_TOKENS, "logprobs": 0, "detokenize": False, "stop_token_ids": list(stops)}
        begin = time.perf_counter()
        for rows in turns:
            prompts = [{"prompt_token_ids": ids.tolist()} for ids in rows["input_ids"]]
            llm.generate(prompts, [params(seed=seed, **options) for seed in rows["seed"].tolist()], use_tqdm=False)
        return time.perf_counter() - begin


@dataclass(frozen=True)
class Result:
    """One rollout, and what vLLM alone takes for its turns."""

    digest: str
    """Of all that was sampled."""
    seconds: float
    ms_a_turn: float
    bare_ms_a_turn: float
    idle_share: float
    idle_answers: float
    controller_mib: float
    worker_mib: float


def rollout(model: Path, generator: Any, bare: Any, case: str, num_episodes: int, scratch: Path) -> Result:
    """A rollout of `num_episodes`, and its turns once more by `bare`."""
    cohorts, environment = CASES[case]
    path = f"{environment.__module__}:{environment.__name__}"
    limits = {"max_turns": slow_game.TURNS, "max_tokens": MAX_TOKENS, "cohorts": cohorts}
    config = PPOConfig(environment={"path": path, **limits}, max_new_tokens=NEW_TOKENS)  # type: ignore[arg-type]
    assert isinstance(config.environment, EnvironmentConfig)
    scratch.mkdir()
    stage: Stage[Any, Any] = Stage("benchmark", 0, config, None, RUNTIME, None, kept=scratch)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(model)
    stops = (tokenizer.eos_token_id, *range(STOP_EVERY, len(tokenizer), STOP_EVERY))
    sampling = Sampling(NEW_TOKENS, 1.0, stops, tokenizer.pad_token_id)
    messages = [[{"role": "user", "content": f"hello {number}"}] for number in range(num_episodes)]
    prompts = list(zip(messages, chat_format(tokenizer).prompts(messages), strict=True))
    about = config.environment
    with TracedPool(path, about.num_workers, about.timeout_s, about.memory_mb) as pool:
        traced = TracedGenerator(generator)
        episodes = Episodes(traced, stage, sampling, tokenizer, MAX_PROMPT, pool)  # type: ignore[arg-type]
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        traced.trace = pool.trace = trace = Trace()
        played = episodes.sample(EpisodeBatch(prompts, {}, 0, "sample"))
        trace.seconds = time.perf_counter() - trace.begin
        workers = [p.pid for p in psutil.Process().children() if worker.__name__ in p.cmdline()]
        peaks = [_peak_mib(pid) for pid in workers]
    assert played.episodes is not None
    failed = [why for why in played.episodes.failure.tolist() if why]
    assert not failed, failed[0]
    bare_seconds = ray.get(bare.play.remote([call.rows for call in trace.calls], stops))
    columns = played.response_ids.values, played.rollout_logprobs.values
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(column).tobytes() for column in columns)).hexdigest()
    turns = int(played.episodes.turns.sum()) / 1000
    return Result(
        digest,
        trace.seconds,
        trace.seconds / turns,
        bare_seconds / turns,
        trace.idle_share,
        trace.idle_answers,
        _peak_mib(os.getpid()),
        max(peaks),
    )


def _peak_mib(pid: int) -> float:
    """The largest resident set that process `pid` ever had."""
    [kib] = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kib) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    mark, about = start_reaper(), machine()
    start_ray(num_cpus=2)
    results: dict[tuple[int, str], list[Result]] = {(count, case): [] for count in options.episodes for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        model = fresh_model(directory / "model")
        # Read when torch is imported, which comes with this module.
        threads = {"OMP_NUM_THREADS": str(RUNTIME.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        settings = {"env_vars": threads | {"GOMP_SPINCOUNT": str(SPIN_COUNT), "MKL_CBWR": REPRODUCIBLE}}
        bare = ray.remote(BareEngine).options(num_cpus=0.2, runtime_env=settings).remote(model)
        spec = GeneratorSpec(model, MAX_PROMPT + MAX_TOKENS)
        with model_opener(RUNTIME, directory / "logs", "benchmark")({"generator": spec}) as models:
            rollout(model, models["generator"], bare, "2 cohorts", WARM_UP, directory / "warm-up")
            for repeat in range(options.repeats):
                for (count, case), found in results.items():
                    scratch = directory / f"{count} {case} {repeat}"
                    found.append(rollout(model, models["generator"], bare, case, count, scratch))
    ray.shutdown()
    kill_tagged(mark)
    print(f"{about}; {slow_game.TURNS} turns an episode, {options.repeats} repeats\n")
    head = ("episodes", "", "seconds a rollout", "ms a turn", "ms a turn, vLLM alone", "ratio", "time without a call")
    table((*head, "answers that met no call", "controller, MiB", "largest worker, MiB"), [])
    for (count, case), found in results.items():
        # Neither which other rollouts were played nor how long answers took on the way changes a byte.
        assert len({r.digest for r in found}) == 1, f"{case}: the same rollout has other bytes"
        columns = [
            spread(r.seconds for r in found),
            spread(r.ms_a_turn for r in found),
            spread(r.bare_ms_a_turn for r in found),
            spread((r.ms_a_turn / r.bare_ms_a_turn for r in found), "×"),
            spread((100 * r.idle_share for r in found), "%"),
            spread((100 * r.idle_answers for r in found), "%"),
            spread(r.controller_mib for r in found),
            spread(r.worker_mib for r in found),
        ]
        line((count, case, *columns))
    for count in options.episodes:
        digests = {r.digest for (of, _), found in results.items() if of == count for r in found}
        print(f"\n{count} episodes: {len(digests)} different rollouts in {len(CASES)} cases")


if __name__ == "__main__":
    main()
