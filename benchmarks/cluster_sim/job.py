"""One PPO stage on simulated models: the product's loop, scheduling, calls and snapshots."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from benchmarks.cluster_sim.cost import Estimate
from benchmarks.cluster_sim.nodes import GPUNodes, driver_bytes, store_bytes
from benchmarks.cluster_sim.workhorse import Scale, SimSpec, SimWorkhorse
from xray_runtime.cluster.opening import WORKHORSES, model_opener
from xray_runtime.cluster.protocols import ModelHandle
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.engines.layouts import FrozenConfig, GeneratorConfig
from xray_runtime.engines.roles import Use
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.graph.artifacts import Dataset, Model, RewardModel
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.kernel.tracking.recorder import StageRecorder, read_points
from xray_runtime.methods.ppo.body import run
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.ppo.ledger_config import LedgerConfig
from xray_runtime.ops.planner.memory import Layout
from xray_runtime.rewards.kinds.model import RewardModelTerm

WORKHORSES[SimSpec] = SimWorkhorse

RUN_ID, STAGE, KEY = "cluster-sim", "ppo-1", "simulated-stage"
PROMPT_TOKENS = 256
"""Prompt length for the cost model; the simulated prompts are shorter."""
TENSOR_PARALLEL = 8
"""GPUs of one of the generator's replicas, as far as there are so many."""
SAMPLE_SECONDS = 0.5
ATTEMPTS = 4


@dataclass(frozen=True)
class Shares:
    """GPUs of each model: half to the policy, a quarter to the generator, an eighth each to reference and reward."""

    num_gpus: int

    def __post_init__(self) -> None:
        if self.num_gpus < 8 or self.num_gpus % 8:
            raise ValueError(f"--gpus: {self.num_gpus} must be a multiple of 8")

    @property
    def policy(self) -> int:
        return self.num_gpus // 2

    @property
    def frozen(self) -> int:
        return self.num_gpus // 8

    @property
    def tensor_parallel(self) -> int:
        return min(TENSOR_PARALLEL, self.num_gpus // 4)

    @property
    def replicas(self) -> int:
        return self.num_gpus // 4 // self.tensor_parallel


@dataclass(frozen=True)
class SimulatedJob:
    """The simulated stage, and its scale."""

    num_gpus: int
    num_parameters: float
    iterations: int
    num_prompts: int
    samples: int
    reply_tokens: int
    scale: Scale

    @property
    def estimate(self) -> Estimate:
        shares = Shares(self.num_gpus)
        return Estimate(
            self.num_parameters,
            self.num_gpus,
            {
                "trained": Layout(zero_stage=3, dp=shares.policy),
                "frozen": Layout(zero_stage=3, dp=shares.frozen),
                "sampled": Layout(tp=shares.tensor_parallel, dp=shares.replicas),
            },
            rollout_size=self.num_prompts * self.samples,
            minibatch_size=self.config.minibatch_size,
            prompt_tokens=PROMPT_TOKENS,
            reply_tokens=self.reply_tokens,
        )

    @property
    def config(self) -> PPOConfig:
        shares, rows = Shares(self.num_gpus), self.num_prompts * self.samples
        return PPOConfig(
            method="grpo",
            iterations=self.iterations,
            prompts_per_iteration=self.num_prompts,
            samples_per_prompt=self.samples,
            minibatch_size=rows // 4,
            epochs=1,
            max_new_tokens=self.reply_tokens // self.scale.tokens,
            rewards=[RewardModelTerm(model="rewards.0")],
            engine=DeepSpeedConfig(num_workhorses=shares.policy, zero_stage=3, precision="bfloat16"),
            frozen=FrozenConfig(num_workhorses=shares.frozen, zero_stage=3, precision="bfloat16"),
            generator=GeneratorConfig(tensor_parallel=shares.tensor_parallel),
            ledger=LedgerConfig(keep="none"),
        )

    @property
    def runtime(self) -> RuntimeConfig:
        return RuntimeConfig(
            device="cuda",
            cpus_per_workhorse=1.0,
            generator_replicas=Shares(self.num_gpus).replicas,
            snapshot_every=1,
            wait_timeout_s=300.0,
        )

    def specs(self, specs: Mapping[str, Any]) -> dict[str, SimSpec]:
        """The loop's models as simulated ones."""
        estimate = self.estimate
        uses: dict[str, Use] = {"policy": "trained", "generator": "sampled"}

        def simulated(role: str, spec: Any) -> SimSpec:
            use = uses.get(role, "frozen")
            replicas = estimate.layouts[use].dp if use == "sampled" else 1
            return SimSpec(spec, estimate.part(use), estimate.rollout_size // replicas, self.scale)

        return {role: simulated(role, spec) for role, spec in specs.items()}


@dataclass
class Watch:
    """Measurements of one run of the stage."""

    iterations_done: list[tuple[int, float]] = field(default_factory=list)
    """(iterations done, time) of every report of progress."""
    opened: list[float] = field(default_factory=list)
    """Seconds from request to built models, of each attempt."""
    failures: list[tuple[str, float]] = field(default_factory=list)
    """(first line of the error, time)."""
    killed: float | None = None
    resumed_at: list[int] = field(default_factory=list)
    """Iterations that each later attempt began with."""
    driver_bytes: int = 0
    store_bytes: int = 0
    heartbeats: int = 0
    """Heartbeats of all Workhorses in the last attempt."""
    calls: int = 0
    seconds: float = 0.0
    """Duration of the last attempt, without opening the models."""


def make_inputs(folder: Path, num_prompts: int) -> PPOInputs:
    """A tokenizer and prompts; a reward model whose scores are taken as they are."""
    for name in ("model", "data", "reward"):
        (folder / name).mkdir(parents=True)
    texts = [f"question number {number}" for number in range(num_prompts)]
    for name in ("model", "reward"):
        train_tokenizer([*texts[:64], "an answer"] * 5, 320).save_pretrained(folder / name)
    examples = [Example(str(i), "c", [{"role": "user", "content": t}], "an answer") for i, t in enumerate(texts)]
    write_pairs(folder / "data" / "train.arrow", Example, examples)
    (folder / "data" / "dataset.json").write_text(json.dumps({"max_prompt_tokens": 64}))
    (folder / "reward" / "reward.json").write_text('{"mean": 0.0, "std": 1.0}')
    return PPOInputs(Model(folder / "model"), Dataset(folder / "data"), rewards=[RewardModel(folder / "reward")])


def simulate(job: SimulatedJob, folder: Path, nodes: GPUNodes, lose_node: bool) -> tuple[Watch, list[dict[str, Any]]]:
    """Run the stage to its end, restarted after a lost node; returns what was seen and each iteration's metrics."""
    watch, inputs = Watch(), make_inputs(folder, job.num_prompts)
    done = threading.Event()
    sampler = threading.Thread(target=_sample, args=(watch, done), daemon=True)
    sampler.start()
    points: list[dict[str, Any]] = []
    try:
        for attempt in range(ATTEMPTS):
            try:
                points = _attempt(job, folder, inputs, nodes, watch, attempt, lose_node)
                break
            except Exception as error:
                if watch.killed is None or attempt == ATTEMPTS - 1:
                    raise
                watch.failures.append((str(error).splitlines()[0], time.monotonic()))
                if attempt == 0:
                    nodes.add_one()
    finally:
        done.set()
        sampler.join()
    return watch, points


def _attempt(
    job: SimulatedJob, folder: Path, inputs: PPOInputs, nodes: GPUNodes, watch: Watch, attempt: int, lose_node: bool
) -> list[dict[str, Any]]:
    out = folder / f"out-{attempt}"
    out.mkdir()

    def progress(stage: str, done: int, total: int, unit: str, note: str) -> None:
        watch.iterations_done.append((done, time.monotonic()))
        if lose_node and watch.killed is None and done >= total // 2:
            watch.killed = time.monotonic()
            threading.Thread(target=nodes.lose_one, daemon=True).start()

    @contextlib.contextmanager
    def open_models(specs: Mapping[str, Any]) -> Iterator[dict[str, ModelHandle]]:
        start = time.monotonic()
        opener: Any = model_opener(job.runtime, folder / "logs" / STAGE, RUN_ID)
        with opener(job.specs(specs)) as models:
            watch.opened.append(time.monotonic() - start)
            yield models
            watch.seconds = time.monotonic() - start - watch.opened[-1]
            _count(models, watch)

    seal = process_seal()
    recorder = StageRecorder(folder, STAGE, KEY, None, progress, job.runtime.snapshot_every, seal)
    recorder.begin()
    if attempt:
        snapshot = recorder.resume()
        watch.resumed_at.append(snapshot.step if snapshot is not None else 0)
    try:
        run(Stage(STAGE, 0, job.config, inputs, job.runtime, open_models, seal=seal), out, recorder)
        return read_points(recorder.metrics_path)
    finally:
        recorder.close()


def _count(models: Mapping[str, Any], watch: Watch) -> None:
    """Heartbeats and calls of all Workhorses."""

    def ask(model: Any) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = ray.get([w.__ray_call__.remote(SimWorkhorse.counts) for w in model._workhorses])
        return found

    counts = [count for model in models.values() for count in ray.get(model.__ray_call__.remote(ask))]
    watch.heartbeats, watch.calls = (sum(each) for each in zip(*counts, strict=True))


def _sample(watch: Watch, done: threading.Event) -> None:
    """Note the most that the driver and the object stores hold."""
    while not done.wait(SAMPLE_SECONDS):
        watch.driver_bytes = max(watch.driver_bytes, driver_bytes())
        with contextlib.suppress(Exception):
            # A node that was lost does not answer.
            watch.store_bytes = max(watch.store_bytes, store_bytes())
