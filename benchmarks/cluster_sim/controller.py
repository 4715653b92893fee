"""The controller's own time for an iteration: the product's WholeModels over Workhorses that cost nothing.

    python -m benchmarks.cluster_sim.controller [--workhorses 8 64 512]

All Workhorses are objects of this process. The WholeModels, their scattering, health monitor, weight sync and joining
are the product's, and so are Ray's references: each call pickles its arguments, as an actor's would, and its answer
lies in Ray's object store. Rows of an iteration are eight a Workhorse. Times are of the processor, with the Workhorses'
part: that of reading arguments. The last column is 1 where twice the Workhorses take twice the time.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray

from benchmarks.cluster_sim.cost import Part
from benchmarks.cluster_sim.job import Shares
from benchmarks.cluster_sim.workhorse import Scale, SimBucket, SimSpec, SimUpdate, SimWorkhorse
from benchmarks.machine import MIB, machine, start_ray, table
from xray_runtime.cluster.handles import ModelProxy
from xray_runtime.cluster.types import WorkerInfo
from xray_runtime.cluster.whole_model import WholeModel
from xray_runtime.data.batch import PromptBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.layouts import FrozenConfig, GeneratorConfig
from xray_runtime.engines.sampling import Sampling
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.kernel.config.section import RuntimeConfig

ROWS, PROMPT_TOKENS, REPLY_TOKENS = 8, 16, 16
"""Rows of an iteration for each Workhorse, and their tokens."""
STEPS = 4
"""Optimizer steps of an iteration."""
PHASES = ("sync", "generate", "score", "update")
EXPORTED_BYTES = 2**20
"""Size of a version's weights, over all ranks of the policy."""
DIGEST = "simulated"


@dataclass
class CountedCalls:
    """Calls that would have gone to actors."""

    calls: int = 0
    num_bytes: int = 0
    """Size of their pickled arguments."""


class FreeWorkhorse(SimWorkhorse):
    """A Workhorse whose work takes no time and copies nothing."""

    def _work(self, call: Any, share: float = 1.0) -> None:
        self.num_calls += 1

    def export_weights(self, version: int, shared: bool, dtype: str | None = None, merged: bool = True) -> SimUpdate:
        size = EXPORTED_BYTES // self.rank_info.world_size
        return SimUpdate(version, (SimBucket(ray.put(np.zeros(size, np.uint8)), self.rank_info.rank),))

    def load_weights(self, update: SimUpdate, verified: bool) -> int:
        self.version = update.version
        return update.version

    def verify_weights(self, update: SimUpdate, number: int, checkers: int) -> None:
        """Costs nothing."""

    def worker_info(self) -> WorkerInfo:
        return WorkerInfo(ray.get_runtime_context().get_node_id(), "here", 1, DIGEST)

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1


@functools.lru_cache(maxsize=4)
def _object(ref: ray.ObjectRef) -> Any:
    return ray.get(ref)


@dataclass(frozen=True)
class CountedMethod:
    call: Callable[..., Any]
    sent: CountedCalls

    def options(self, **_: Any) -> CountedMethod:
        return self

    def remote(self, *arguments: Any, **fields: Any) -> Any:
        # An actor gets the object in place of a reference to it, and reads it in its own process: here once for all.
        content = ray.cloudpickle.dumps((arguments, fields))
        self.sent.calls, self.sent.num_bytes = self.sent.calls + 1, self.sent.num_bytes + len(content)
        found = [_object(one) if isinstance(one, ray.ObjectRef) else one for one in arguments]
        return ray.put(self.call(*found, **fields))


@dataclass(frozen=True)
class CountedHandle:
    """The handle of an object in this process, as that of an actor."""

    target: Any
    sent: CountedCalls

    def __getattr__(self, name: str) -> CountedMethod:
        return CountedMethod(getattr(self.target, name), self.sent)


@dataclass
class Models:
    """The models of a stage, and what their calls sent to Workhorses."""

    policy: ModelProxy
    reference: ModelProxy
    generator: ModelProxy
    sent: CountedCalls = field(default_factory=CountedCalls)


def opened(num_workhorses: int, folder: Path) -> Models:
    """Half of the Workhorses train, a quarter samples, and the rest scores."""
    shares, sent = Shares(num_workhorses), CountedCalls()
    runtime = RuntimeConfig(device="cpu", generator_replicas=shares.replicas)
    scored = shares.num_gpus - shares.policy - shares.replicas * shares.tensor_parallel
    layouts: dict[str, tuple[Any, int, int]] = {
        "policy": (DeepSpeedConfig(num_workhorses=shares.policy, zero_stage=3), shares.policy, 1),
        "reference": (FrozenConfig(num_workhorses=scored, zero_stage=3), scored, 1),
        "generator": (
            GeneratorConfig(tensor_parallel=shares.tensor_parallel),
            shares.replicas * shares.tensor_parallel,
            shares.replicas,
        ),
    }
    proxies = {}
    for role, (layout, count, replicas) in layouts.items():
        spec = SimSpec(
            cast("Any", SimulatedLayout(layout)), Part(1e6, count, {}), ROWS * num_workhorses, Scale(0.0, 1, 1)
        )
        workhorses = [CountedHandle(FreeWorkhorse(runtime), sent) for _ in range(count)]
        model = WholeModel()
        model.build(role, runtime, folder, cast("Any", spec), cast("Any", workhorses), replicas, DIGEST)
        proxies[role] = ModelProxy(cast("Any", CountedHandle(model, CountedCalls())), role, layout, replicas)
    return Models(**proxies, sent=sent)


@dataclass(frozen=True)
class SimulatedLayout:
    """A spec that has a layout and nothing else."""

    layout: Any
    adapter: None = None

    def located(self, find: Callable[[Path], Path]) -> SimulatedLayout:
        return self


def iteration(models: Models, version: int, num_rows: int) -> dict[str, float]:
    """Seconds of a core in each phase of GRPO's loop."""
    took, start = {}, time.process_time()

    def phase(name: str) -> None:
        nonlocal start
        now = time.process_time()
        took[name], start = now - start, now

    ids = np.ones((num_rows, PROMPT_TOKENS), np.int64)
    prompts = PromptBatch(input_ids=Ragged.of(ids), seed=np.arange(num_rows))
    sampling = Sampling(max_new_tokens=REPLY_TOKENS, temperature=1.0, stop_token_ids=(2,), pad_token_id=0)
    update = ray.get(models.policy.export_weights.remote(version))
    ray.get(models.generator.load_weights.remote(update))
    phase("sync")
    replies = ray.get(models.generator.generate.remote(prompts, sampling, version))
    phase("generate")
    assert len(replies) == num_rows
    whole = Ragged.of(np.ones((num_rows, PROMPT_TOKENS + REPLY_TOKENS), np.int64))
    rows = TextBatch(input_ids=whole, prompt_lengths=np.full(num_rows, PROMPT_TOKENS))
    scores = [model.score.remote(rows) for model in (models.policy, models.reference)]
    assert all(len(ray.get(score)) == num_rows for score in scores)
    phase("score")
    for step in np.array_split(np.arange(num_rows), STEPS):
        ray.get(models.policy.train.remote(rows.take(step), StepTotals(), 1e-3))
    phase("update")
    return took


def measure(num_workhorses: int, iterations: int) -> tuple[dict[str, float], CountedCalls, float]:
    """(median seconds of each phase, what an iteration sends, seconds to open)."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        models = opened(num_workhorses, Path(folder))
        open_s = time.process_time() - start
        iteration(models, 1, ROWS * num_workhorses)
        models.sent.calls = models.sent.num_bytes = 0
        found = [iteration(models, 2 + number, ROWS * num_workhorses) for number in range(iterations)]
    sent = CountedCalls(models.sent.calls // iterations, models.sent.num_bytes // iterations)
    return {name: statistics.median(one[name] for one in found) for name in PHASES}, sent, open_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workhorses", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--iterations", type=int, default=5)
    options = parser.parse_args()
    print(f"{machine()}\n", flush=True)
    start_ray(num_cpus=1)
    rows, before = [], (0, 0.0)
    for count in options.workhorses:
        seconds, sent, open_s = measure(count, options.iterations)
        total = sum(seconds.values())
        growth = f"{math.log(total / before[1]) / math.log(count / before[0]):.2f}" if before[0] else "–"
        before = count, total
        phases = (f"{1e3 * seconds[name]:.0f}" for name in PHASES)
        each = f"{1e3 * total / count:.2f}"
        rows.append((count, f"{open_s:.2f}", *phases, f"{1e3 * total:.0f}", each, sent.calls,
                     f"{sent.num_bytes / MIB:.1f}", growth))  # fmt: skip
    head = ("Workhorses", "open, s", *(f"{name}, ms" for name in PHASES), "iteration, ms", "ms a Workhorse")
    table((*head, "calls", "sent, MiB", "grows as the power"), rows)
    ray.shutdown()


if __name__ == "__main__":
    main()
