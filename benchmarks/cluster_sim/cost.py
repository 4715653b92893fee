"""Seconds of each model's calls on H100s in nodes of eight, by the planner's cost model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.engines.roles import Use
from xray_runtime.models.shapes import from_parameter_count
from xray_runtime.ops.planner.cost import GPUS, iteration_seconds, score_seconds
from xray_runtime.ops.planner.disk import SNAPSHOT_BYTES
from xray_runtime.ops.planner.memory import Layout
from xray_runtime.ops.planner.model_states import HALF_BYTES
from xray_runtime.ops.planner.workload import PlannedRole, Workload

Call = Literal["train", "score", "generate", "export", "load", "snapshot"]
[H100] = [gpu for gpu in GPUS if gpu.name == "H100"]
NODE_SIZE = 8
MICRO_BATCH_TOKENS = 16_384
CACHE_SCALE = 64
"""A KV cache of a million tokens: what eight H100s hold beside a 70B model."""
DISK_BYTES_PER_S = 2e9
"""A rank's share of the disk's bandwidth."""
USES: dict[str, Use] = {"policy": "trained", "reference": "frozen", "reward": "frozen", "generator": "sampled"}


@dataclass(frozen=True)
class Part:
    """One model on its GPUs."""

    num_parameters: float
    num_gpus: int
    """GPUs of the whole model; a generator counts those of all replicas."""
    seconds: dict[Call, float]
    """Seconds of a call over all rows of an iteration, of one weight transfer, or of one snapshot."""


@dataclass(frozen=True)
class Estimate:
    """GRPO without a critic: a policy, a reference, a reward model, and a generator."""

    num_parameters: float
    num_gpus: int
    """GPUs of all models."""
    layouts: dict[Use, Layout]
    rollout_size: int
    minibatch_size: int
    prompt_tokens: int
    reply_tokens: int

    @property
    def workload(self) -> Workload:
        shape = from_parameter_count(self.num_parameters)
        return Workload(
            roles=tuple(
                PlannedRole(name=name, shape=shape, use=use, weight_bytes=HALF_BYTES, scores_tokens=name != "reward")
                for name, use in USES.items()
            ),
            sequence_tokens=self.prompt_tokens + self.reply_tokens,
            response_tokens=self.reply_tokens,
            batch_size=self.minibatch_size,
            rollout_size=self.rollout_size,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            cache_scale=CACHE_SCALE,
            generator_replicas=self.layouts["sampled"].dp,
        )

    @property
    def machine(self) -> Machine:
        return Machine(num_devices=self.num_gpus, memory_bytes=H100.memory_bytes, devices_per_node=NODE_SIZE)

    def phases(self) -> dict[str, float]:
        """Phase → seconds of an iteration."""
        return iteration_seconds(self.workload, self.layouts, self.machine, shared=False)

    def part(self, use: Use) -> Part:
        """A model of this use with its calls."""
        layout, phases = self.layouts[use], self.phases()
        if use == "sampled":
            seconds: dict[Call, float] = {"generate": phases["generate"], "load": phases["sync"] / 2}
        else:
            [role, *_] = self.workload.of_use(use)
            seconds = {"score": score_seconds(role, layout, self.workload, self.machine)}
        if use == "trained":
            written = SNAPSHOT_BYTES * self.num_parameters / layout.num_devices
            seconds |= {"train": phases["update"], "export": phases["sync"] / 2, "snapshot": written / DISK_BYTES_PER_S}
        return Part(self.num_parameters, layout.num_devices, seconds)
