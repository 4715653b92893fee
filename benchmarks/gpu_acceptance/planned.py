"""Bytes and seconds that the planner gives for the acceptance's models, to compare with measurements."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.gpu_acceptance.setting import Setting
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.models.config import PretrainedBase
from xray_runtime.models.pretrained_shapes import from_pretrained
from xray_runtime.models.shapes import ModelShape
from xray_runtime.ops.planner.cost import generate_seconds, update_seconds
from xray_runtime.ops.planner.memory import Layout
from xray_runtime.ops.planner.plan import Plan
from xray_runtime.ops.planner.search import search
from xray_runtime.ops.planner.workload import PlannedRole, Workload, training_options

HALF_BYTES = 2
"""Bytes of a weight that vLLM holds on a GPU."""


def shape_of(setting: Setting) -> ModelShape:
    return from_pretrained(PretrainedBase(model=str(setting.model)))


def machine(setting: Setting, num_gpus: int = 1) -> Machine:
    memory = torch.cuda.get_device_properties(0).total_memory if setting.device == "cuda" else 80 * 2**30
    return Machine(num_devices=num_gpus, memory_bytes=memory)


def trained_role(setting: Setting, spec: ModelSpec) -> PlannedRole:
    assert spec.training is not None
    width, options = training_options(spec.training.lora, spec.training.engine, setting.device)
    return PlannedRole(name="policy", shape=shape_of(setting), use="trained", weight_bytes=width, options=options)


def sampled_role(setting: Setting) -> PlannedRole:
    return PlannedRole(name="generator", shape=shape_of(setting), use="sampled", weight_bytes=HALF_BYTES)


def workload(setting: Setting, *roles: PlannedRole, micro_batch_tokens: int) -> Workload:
    """The batch of the setting, rolled out and learned from once; the choices of the layout are the caller's."""
    lengths = setting.rows.input_ids.lengths
    return Workload(
        roles=roles,
        sequence_tokens=int(lengths.max()),
        response_tokens=int((lengths - setting.rows.prompt_lengths).max()),
        batch_size=setting.size.num_rows,
        rollout_size=setting.size.num_rows,
        micro_batch_tokens=micro_batch_tokens,
        device="cuda",
    )


def training(setting: Setting, spec: ModelSpec) -> tuple[int, float]:
    """(peak bytes on the fullest device without what a process holds outside torch's allocator, seconds of a step)."""
    assert spec.training is not None
    engine, role = spec.training.engine, trained_role(setting, spec)
    layout = Layout(
        zero_stage=engine.sharding_level,
        tp=engine.tensor_parallel,
        pp=engine.pipeline_parallel,
        dp=engine.data_parallel,
    )
    one = workload(setting, role, micro_batch_tokens=engine.micro_batch_tokens)
    memory = one.memory(role, layout)
    return memory.total - memory.process, update_seconds(role, layout, one, machine(setting, layout.num_devices))


def sampling_seconds(setting: Setting) -> float:
    """Seconds to sample the batch with one replica."""
    role = sampled_role(setting)
    one = workload(setting, role, micro_batch_tokens=setting.size.micro_batch_tokens)
    return generate_seconds(role, Layout(), one, machine(setting))


def in_turn(setting: Setting, spec: ModelSpec) -> Plan:
    """The plan of policy and generator on one GPU, each asleep while the other works."""
    assert spec.training is not None
    roles = trained_role(setting, spec), sampled_role(setting)
    one = workload(setting, *roles, micro_batch_tokens=spec.training.engine.micro_batch_tokens)
    return search(replace(one, generator_sleeps=True, trainer_sleeps=True), machine(setting))
