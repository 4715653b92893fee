"""Processes of models for tests: opened as a stage opens them, held, and found. It imports no torch, which each actor
of a class from here would import with it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.opening import WORKHORSES, model_opener
from xray_runtime.cluster.types import RankInfo
from xray_runtime.cluster.whole_model import WholeModel
from xray_runtime.cluster.workhorse import Workhorse
from xray_runtime.kernel.config.section import RuntimeConfig

RUN_ID = "tests"
SECONDS = 120


def open_models(
    runtime: RuntimeConfig, log_dir: Path, specs: Mapping[str, ModelSpec | GeneratorSpec], run_id: str = RUN_ID
) -> AbstractContextManager[dict[str, Any]]:
    """What a stage of the run `run_id` with this log directory would open."""
    return model_opener(runtime, log_dir, run_id)(specs)


class Empty(Workhorse):
    """A process that holds no model, for tests of processes alone."""

    def build(self, spec: ModelSpec, rank_info: RankInfo) -> None: ...


class Other(Empty):
    """Another kind of process."""


@dataclass(frozen=True)
class EmptySpec(ModelSpec):
    objective: Any = None


WORKHORSES[EmptySpec] = Empty


@ray.remote(num_cpus=0)
class Holder:
    """Holds leases and tickets, as a WholeModel does; its owner's death is its own."""

    def ping(self) -> None: ...

    def work(self, seconds: float) -> None:
        time.sleep(seconds)


@ray.remote(num_cpus=0)
class Meeting:
    """Counts what has begun, and who met whom."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.met: list[tuple[str, int]] = []

    def begin(self, what: str) -> int:
        self.begun[what] += 1
        return self.begun[what]

    def has_begun(self, what: str) -> int:
        return self.begun[what]

    def meet(self, who: str, number: int) -> None:
        self.met.append((who, number))

    def all_met(self) -> list[tuple[str, int]]:
        return self.met


@ray.remote(num_cpus=0)
class Receiver:
    """A generator's rank that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def receive(self, step: str, info: dict[str, Any], version: int) -> None:
        self.calls.append((step, version))

    def noted(self) -> list[tuple[str, int]]:
        return self.calls


def pids(model: Any) -> list[int]:
    """Process ids of a model's Workhorses, in order of rank."""

    def ask(self: WholeModel) -> list[int]:
        return ray.get([w.__ray_call__.remote(lambda _: os.getpid()) for w in self._workhorses])

    found: list[int] = ray.get(model.__ray_call__.remote(ask), timeout=SECONDS)
    return found


def pid_of(actor: Any) -> int:
    """Process id of an actor."""
    found: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=SECONDS)
    return found


def gone(pid: int) -> bool:
    """Whether a process ends in time."""
    deadline = time.monotonic() + SECONDS
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)
