"""How long generator and trainer wait for each other: synchronous, `lag: 1`, and `in_flight_updates`.

    python -m benchmarks.in_flight [--task lengths|quickstart] [--iterations 12] [--repeats 3] [--modes NAME…]

Real engines, vLLM and DeepSpeed, in processes of their own with one thread each. With the task `lengths`, GRPO of 32
replies, these end at random, so that their lengths differ by more than 20 times, and the small model's calls sleep
until they have taken what they would take on devices of their own: 20 ms a token of the longest reply, 0.5 s an
optimizer step, so that a rollout takes about as long as an update. `quickstart` is the first PPO stage of
configs/quickstart.yaml with its base and a function as reward, at a learning rate so small that replies keep their
lengths in every mode, and nothing sleeps. Every call of the generator and of the trainer writes its begin and end; idle
is the share of the time, from the second iteration on, in which a process had none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from benchmarks.layouts import make_model
from benchmarks.machine import line, machine, spread, start_ray, table
from xray_runtime.cluster.generator import Generator
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.opening import WORKHORSES, model_opener
from xray_runtime.cluster.pool.pool import open_worker_pool
from xray_runtime.cluster.stage import Stage
from xray_runtime.cluster.types import RankInfo
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, StepTotals, TextBatch
from xray_runtime.data.pairs import TRAIN, Example, write_pairs
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.methods.ppo.body import run
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.models.config import FreshBase
from xray_runtime.rewards.config import reward_term

BASE = FreshBase(
    vocab_size=512, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=192, max_positions=512
)
NUM_STOPS = 6
"""Tokens of 512 that end a reply, of a policy that draws all of them about as often."""
LENGTHS: dict[str, Any] = {
    "method": "grpo", "max_new_tokens": 256, "epochs": 3, "prompts_per_iteration": 8, "samples_per_prompt": 4,
    "minibatch_size": 16, "lr": 1e-6, "reward_scaling": "none", "truncated": "penalize",
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "lag 1": {"lag": 1},
    "in flight, lag 2": {"lag": 2, "in_flight_updates": True},
    "in flight, lag 2, oversample 0.25": {"lag": 2, "in_flight_updates": True, "oversample": 0.25},
}
TASKS, POOL = ("lengths", "quickstart"), "benchmark"
TOKEN_S, STEP_S = 0.02, 0.5


def task_of(name: str) -> tuple[FreshBase, dict[str, Any]]:
    """(base, fields of the stage)"""
    if name == "lengths":
        return BASE, LENGTHS
    content = yaml.safe_load((Path(__file__).parents[1] / "configs" / "quickstart.yaml").read_text())
    return FreshBase(**content["base"]), content["ppo"]["stages"][0] | {"lr": 1e-6}


@contextmanager
def noted(events: Path, what: str, seconds: list[float]) -> Iterator[None]:
    """Append begin and end of a call, which takes at least the sum of `seconds`."""
    begin = time.time()
    yield
    time.sleep(max(0.0, begin + sum(seconds) - time.time()))
    with events.open("a") as file:
        file.write(json.dumps([what, begin, time.time()]) + "\n")


class TimedGenerator(Generator):
    def build(self, spec: GeneratorSpec, rank_info: RankInfo) -> None:
        assert isinstance(spec, TimedGeneratorSpec)
        self._events, self._sleeps = spec.events, spec.sleeps
        super().build(spec, rank_info)

    def generate(self, rows: PromptBatch, sampling: Sampling, version: int) -> ReplyBatch:
        seconds: list[float] = []
        with noted(self._events, "generator", seconds):
            replies = super().generate(rows, sampling, version)
            seconds.append(self._sleeps * TOKEN_S * int(replies.response_ids.lengths.max()))
            return replies


class TimedLearner(Learner):
    def build(self, spec: ModelSpec, rank_info: RankInfo) -> None:
        assert isinstance(spec, TimedModelSpec)
        self._events, self._sleeps = spec.events, spec.sleeps
        super().build(spec, rank_info)

    def score(self, rows: TextBatch) -> Scores:
        with noted(self._events, "trainer", []):
            return super().score(rows)

    def train(self, rows: TextBatch, totals: StepTotals, lr: float) -> dict[str, float]:
        with noted(self._events, "trainer", [self._sleeps * STEP_S]):
            return super().train(rows, totals, lr)


@dataclass(frozen=True)
class TimedGeneratorSpec(GeneratorSpec):
    events: Path = Path()
    sleeps: bool = False


@dataclass(frozen=True)
class TimedModelSpec(ModelSpec):
    events: Path = Path()
    sleeps: bool = False


WORKHORSES |= {TimedGeneratorSpec: TimedGenerator, TimedModelSpec: TimedLearner}


class WaitRecorder:
    """Keeps when each iteration ended, and its metrics."""

    def __init__(self, directory: Path) -> None:
        self.log_dir, self.points = directory, list[dict[str, float]]()
        self.ends: list[float] = []

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.points.append(dict(values))
        self.ends.append(time.time())

    def snapshot_due(self, step: int) -> bool:
        return False

    def resume(self) -> None:
        return None

    def progress(self, *_: Any) -> None: ...

    def table(self, *_: Any) -> None: ...


@dataclass(frozen=True)
class WaitMeasurement:
    per_minute: float
    generator_s: float
    """Seconds an iteration in which the generator had a call."""
    trainer_s: float
    generator_idle: float
    trainer_idle: float
    lengths: float
    """95th percentile of replies' lengths over the 5th."""
    lag: float


def measured(model: Path, root: Path, task: str, mode: str, iterations: int) -> WaitMeasurement:
    root.mkdir()
    given = task_of(task)[1] | MODES[mode] | {"iterations": iterations}
    config = PPOConfig(**given, rewards=[reward_term(function="even")])
    texts = [f"question number {number}" for number in range(64)]
    examples = [Example(str(i), "c", [{"role": "user", "content": text}], "fine") for i, text in enumerate(texts)]
    write_pairs(root / TRAIN, Example, examples)
    (root / "dataset.json").write_text('{"max_prompt_tokens": 64}')
    runtime, events = RuntimeConfig(threads=1, device="cpu", generator_memory_gib=0.5), root / "events.jsonl"
    opened = model_opener(runtime, root / "logs", POOL)

    @contextmanager
    def timed(specs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        kinds = {GeneratorSpec: TimedGeneratorSpec, ModelSpec: TimedModelSpec}
        more = {"events": events, "sleeps": task == "lengths"}
        made = {
            role: kinds[type(spec)](**{each.name: getattr(spec, each.name) for each in fields(spec)}, **more)
            for role, spec in specs.items()
        }
        with opened(made) as models:
            yield models

    functions = {"even": lambda prompts, replies: [float(len(reply) % 2) for reply in replies]}
    recorder, out = WaitRecorder(root), root / "out"
    out.mkdir()
    stage = Stage("ppo", 3, config, PPOInputs(Model(model), Dataset(root)), runtime, timed, functions, root)
    run(stage, out, recorder)  # type: ignore[arg-type]
    first, last = recorder.ends[0], recorder.ends[-1]
    works = {who: busy(events, who, first, last) for who in ("generator", "trainer")}
    return WaitMeasurement(
        60 * (iterations - 1) / (last - first),
        works["generator"] / (iterations - 1),
        works["trainer"] / (iterations - 1),
        1 - works["generator"] / (last - first),
        1 - works["trainer"] / (last - first),
        spread_of_lengths(out),
        statistics.mean(point["rollout/lag"] for point in recorder.points),
    )


def busy(events: Path, who: str, begin: float, end: float) -> float:
    """Seconds between `begin` and `end` in which the generator, or one of the models that score and learn, had a
    call."""
    calls = [json.loads(each) for each in events.read_text().splitlines()]
    seconds, done = 0.0, begin
    for b, e in sorted((b, min(e, end)) for what, b, e in calls if what == who):
        seconds += max(0.0, e - max(b, done))
        done = max(done, e)
    return seconds


def spread_of_lengths(out: Path) -> float:
    from xray_runtime.data.ledger import read_shard

    shards = [read_shard(path).table for path in (out / "ledger").iterdir()]
    lengths = sorted(len(ids) for table in shards for ids in table["reply_ids"].to_pylist())
    return lengths[len(lengths) * 95 // 100] / lengths[len(lengths) * 5 // 100]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--task", choices=TASKS, default="lengths")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options = parser.parse_args()
    about, found = machine(), {name: list[WaitMeasurement]() for name in options.modes}
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", task_of(options.task)[0])
        written = model / "generation_config.json"
        stops = json.loads(written.read_text()) if written.is_file() else {}
        if options.task == "lengths":
            stops["eos_token_id"] = [0, *range(100, 100 + NUM_STOPS)]
            written.write_text(json.dumps(stops))
        start_ray(4)
        pool = open_worker_pool(POOL)  # processes are used again
        for repeat in range(options.repeats):
            for name in options.modes:
                root = Path(scratch) / f"{name.replace(' ', '-')}-{repeat}"
                found[name].append(measured(model, root, options.task, name, options.iterations))
                print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
        del pool
    print(f"{about}; {options.iterations} iterations, task {options.task}\n")
    columns: dict[str, Callable[[WaitMeasurement], float]] = {
        "iterations a minute": lambda each: each.per_minute,
        "generation, s": lambda each: each.generator_s,
        "training, s": lambda each: each.trainer_s,
        "generator idle, %": lambda each: 100 * each.generator_idle,
        "trainer idle, %": lambda each: 100 * each.trainer_idle,
        "lengths, p95 ÷ p5": lambda each: each.lengths,
        "lag, updates": lambda each: each.lag,
    }
    table(("", *columns), [])
    for name, runs in found.items():
        line((name, *(spread(map(column, runs)) for column in columns.values())))


if __name__ == "__main__":
    main()
