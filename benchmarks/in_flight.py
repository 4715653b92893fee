"""How long generator and trainer wait for each other: synchronous, `lag: 1`, and `in_flight_updates`.

    python -m benchmarks.in_flight [--iterations 12] [--repeats 3] [--task lengths|quickstart]

GRPO over real engines, vLLM and DeepSpeed, in processes of their own with one thread each. With the task `lengths`
replies end at random, so that their lengths differ by more than 20 times, and the small model's calls sleep until they
have taken what they would take on devices of their own: 10 ms a token of the longest reply, 0.25 s an optimizer step,
so that a rollout takes about as long as an update. With `quickstart` replies have 16 tokens, and nothing sleeps. Every
call of the generator and of the trainer writes its begin and end; idle is the share of the time, from the second
iteration on, in which a process had none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.layouts import make_model
from benchmarks.machine import line, machine, spread, start_ray, table
from xray_runtime.cluster.generator import Generator
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.opening import WORKHORSES, model_opener
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
    vocab_size=512, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=4, intermediate_size=384, max_positions=512
)
NUM_STOPS = 12
"""Tokens of 512 that end a reply, of a policy that draws all of them about as often."""
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "lag 1": {"lag": 1},
    "in flight, lag 2": {"lag": 2, "in_flight_updates": True},
    "in flight, lag 2, oversample 0.25": {"lag": 2, "in_flight_updates": True, "oversample": 0.25},
}
TASKS: dict[str, dict[str, Any]] = {
    "lengths": {"max_new_tokens": 384, "epochs": 4},
    "quickstart": {"max_new_tokens": 16, "epochs": 4},
}


TOKEN_S, STEP_S = 0.01, 0.25


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


class Recorder:
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
class Measured:
    per_minute: float
    generator_idle: float
    trainer_idle: float
    lengths: float
    """95th percentile of replies' lengths over the 5th."""
    lag: float


def measured(model: Path, root: Path, task: str, mode: str, iterations: int) -> Measured:
    root.mkdir()
    config = PPOConfig(
        method="grpo", iterations=iterations, prompts_per_iteration=8, samples_per_prompt=4, minibatch_size=16,
        lr=1e-6, reward_scaling="none", truncated="penalize", rewards=[reward_term(function="even")],
        **TASKS[task] | MODES[mode],
    )  # fmt: skip
    texts = [f"question number {number}" for number in range(64)]
    examples = [Example(str(i), "c", [{"role": "user", "content": text}], "fine") for i, text in enumerate(texts)]
    write_pairs(root / TRAIN, Example, examples)
    (root / "dataset.json").write_text('{"max_prompt_tokens": 64}')
    runtime, events = RuntimeConfig(threads=1, device="cpu", generator_memory_gib=0.5), root / "events.jsonl"
    opened = model_opener(runtime, root / "logs", "")

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
    recorder, out = Recorder(root), root / "out"
    out.mkdir()
    stage = Stage("ppo", 3, config, PPOInputs(Model(model), Dataset(root)), runtime, timed, functions, root)
    run(stage, out, recorder)  # type: ignore[arg-type]
    first, last = recorder.ends[0], recorder.ends[-1]
    idle = {who: 1 - busy(events, who, first, last) / (last - first) for who in ("generator", "trainer")}
    return Measured(
        60 * (iterations - 1) / (last - first),
        idle["generator"],
        idle["trainer"],
        spread_of_lengths(out),
        statistics.mean(point["rollout/lag"] for point in recorder.points),
    )


def busy(events: Path, who: str, begin: float, end: float) -> float:
    """Seconds between `begin` and `end` in which a process had a call; its calls do not overlap."""
    calls = (json.loads(each) for each in events.read_text().splitlines())
    return sum(max(0.0, min(e, end) - max(b, begin)) for what, b, e in calls if what == who)


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
    options = parser.parse_args()
    about, found = machine(), {name: list[Measured]() for name in MODES}
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", BASE)
        written = model / "generation_config.json"
        stops = json.loads(written.read_text()) if written.is_file() else {}
        if options.task == "lengths":
            stops["eos_token_id"] = [0, *range(100, 100 + NUM_STOPS)]
            written.write_text(json.dumps(stops))
        start_ray(4)
        for repeat in range(options.repeats):
            for name in MODES:
                root = Path(scratch) / f"{name.replace(' ', '-')}-{repeat}"
                found[name].append(measured(model, root, options.task, name, options.iterations))
    print(f"{about}; {options.iterations} iterations of 32 replies, task {options.task}\n")
    head = ("", "iterations a minute", "generator idle, %", "trainer idle, %", "lengths, p95 ÷ p5", "lag, updates")
    table(head, [])
    for name, runs in found.items():
        idle = (spread(100 * getattr(each, f"{who}_idle") for each in runs) for who in ("generator", "trainer"))
        rest = (spread(each.lengths for each in runs), spread(each.lag for each in runs))
        line((name, spread(each.per_minute for each in runs), *idle, *rest))


if __name__ == "__main__":
    main()
