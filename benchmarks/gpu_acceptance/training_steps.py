"""Steps that train: every ZeRO stage and precision, offload, recomputation, LoRA, Megatron, snapshots, sleep."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_acceptance import planned
from benchmarks.gpu_acceptance.machine_steps import matmul_flops
from benchmarks.gpu_acceptance.setting import Setting, check, free_bytes, weights_digest
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import StepTotals, TextBatch
from xray_runtime.models.causal_lm import load_model
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.shapes import ModelShape

LR = 1e-4
NUM_STEPS = 4
LIMITS = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest relative difference of the first loss and gradient norm from plain transformers in float32."""


def prepare(setting: Setting) -> dict[str, Any]:
    """Write the model, and its loss and gradient norm on the batch by plain transformers, sequence by sequence."""
    setting.make_model()
    lm = load_model(setting.model).to(setting.device)
    lm.requires_grad_()
    total, rows = setting.rows.num_response_tokens(), setting.rows
    loss = 0.0
    for ids, start in zip(rows.input_ids, rows.prompt_lengths, strict=True):
        tokens = torch.from_numpy(ids).to(setting.device)
        logits = lm(tokens[None]).logits[0, start - 1 : -1].float()
        part = torch.nn.functional.cross_entropy(logits, tokens[start:], reduction="sum") / total
        part.backward()
        loss += float(part)
    norm = torch.stack([p.grad.norm() for p in lm.parameters() if p.grad is not None]).norm()
    expected = {"loss": loss, "grad_norm": float(norm)}
    (setting.folder / "expected.json").write_text(json.dumps(expected))
    return expected | {"num_parameters": sum(p.numel() for p in lm.parameters()), "num_tokens": total}


@dataclass(frozen=True)
class Steps:
    """Optimizer steps on the same rows, of one rank or merged over ranks."""

    losses: list[float]
    grad_norm: float
    """Of the first step."""
    seconds: float
    """Of the fastest step but the first."""
    peak_bytes: int | None
    """The most that torch's allocator held; None on CPU."""


def run_steps(learner: Learner, deal: Callable[[TextBatch], TextBatch], rows: TextBatch) -> Steps:
    """`NUM_STEPS` steps on one rank. The losses are this rank's share."""
    tokens = float(rows.num_response_tokens())
    on_gpu = learner.device.type == "cuda"
    losses, norms, seconds = [], [], []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        stats = learner.train(deal(rows), StepTotals(tokens=tokens), LR)
        seconds.append(time.perf_counter() - start)
        losses.append(stats.get("nll", 0.0) / tokens)
        norms.append(stats["grad_norm"])
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return Steps(losses, norms[0], min(seconds[1:]), peak)


def figures(setting: Setting, spec: ModelSpec, steps: Steps, num_gpus: int = 1) -> dict[str, Any]:
    """Speed, memory and correctness of `steps`; raises StepFailed where one is outside its limit."""
    assert spec.training is not None
    engine, lora = spec.training.engine, spec.training.lora
    expected = json.loads((setting.folder / "expected.json").read_text())
    limit = LIMITS[engine.precision]
    off = abs(steps.losses[0] / expected["loss"] - 1)
    check(off < limit, f"first loss {steps.losses[0]:.6g} is not that of plain transformers, {expected['loss']:.6g}")
    if lora is None:
        norm = expected["grad_norm"]
        check(
            abs(steps.grad_norm / norm - 1) < limit,
            f"gradient norm {steps.grad_norm:.6g} is not that of plain transformers, {norm:.6g}",
        )
    check(steps.losses[-1] < steps.losses[0], f"the loss does not fall: {steps.losses}")
    shape = planned.shape_of(setting)
    flops = num_gpus * matmul_flops(setting, getattr(torch, engine.precision))
    tokens = int(setting.rows.input_ids.lengths.sum())
    rate = training_flops(setting, shape) / steps.seconds
    found: dict[str, Any] = {
        "losses": steps.losses,
        "seconds_a_step": steps.seconds,
        "tokens_per_s": tokens / steps.seconds,
        "tflops": rate / 1e12,
        # Of what a matrix product reaches on this device in this precision, not of a data sheet.
        "mfu": rate / flops,
    }
    if steps.peak_bytes is not None:
        most, seconds = planned.training(setting, spec)
        found |= {"peak_bytes": steps.peak_bytes, "planned_bytes": most, "peak_share": steps.peak_bytes / most}
        found |= {"planned_seconds": seconds, "seconds_over_planned": steps.seconds / seconds}
        check(steps.peak_bytes <= most, f"peak {steps.peak_bytes / 1e9:.2f} GB is over the planned {most / 1e9:.2f}")
    return found


def training_flops(setting: Setting, shape: ModelShape) -> float:
    """Operations of a step: 6 a parameter and token, and attention's 12·h·S a layer and token, halved by causality."""
    lengths = setting.rows.input_ids.lengths
    attended = 6 * shape.num_layers * shape.num_heads * shape.head_size * float((lengths**2).sum())
    return 6.0 * shape.num_parameters * int(lengths.sum()) + attended


def train(setting: Setting, lora: LoRAConfig | None = None, **engine: Any) -> dict[str, Any]:
    """A few steps on one device under these fields of the engine."""
    spec = setting.spec(lora, **engine)
    with setting.learner(spec) as learner:
        steps = run_steps(learner, lambda rows: rows, setting.rows)
    return figures(setting, spec, steps)


def lora(setting: Setting) -> dict[str, Any]:
    """Adapters of rank 16 on all projections, in bfloat16."""
    return train(setting, LoRAConfig(), precision="bfloat16")


def snapshots(setting: Setting) -> dict[str, Any]:
    """Save and load: the same bits come back, in place and in a new engine; seconds and bytes."""
    directory, spec = setting.folder / "snapshot", setting.spec(precision="bfloat16", zero_stage=2)
    totals = StepTotals(tokens=float(setting.rows.num_response_tokens()))
    directory.mkdir()
    try:
        with setting.learner(spec) as learner:
            learner.train(setting.rows, totals, LR)
            saved = weights_digest(learner)
            start = time.perf_counter()
            learner.save_state(directory)
            save_s = time.perf_counter() - start
            learner.train(setting.rows, totals, LR)
            check(weights_digest(learner) != saved, "a step changed no weight")
        with setting.learner(spec) as learner:
            start = time.perf_counter()
            learner.load_state(directory)
            load_s = time.perf_counter() - start
            check(weights_digest(learner) == saved, "other weights came back than were saved")
        size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    finally:
        shutil.rmtree(directory)
    return {"num_bytes": size, "save_s": save_s, "load_s": load_s}


def trainer_sleep(setting: Setting) -> dict[str, Any]:
    """A sleeping trainer's bytes are free for others, and come back as they were."""
    spec = setting.spec(precision="bfloat16", zero_stage=2)
    totals = StepTotals(tokens=float(setting.rows.num_response_tokens()))
    with setting.learner(spec, trainer_sleeps=True) as learner:
        learner.train(setting.rows, totals, LR)
        before, awake = weights_digest(learner), free_bytes()
        start = time.perf_counter()
        learner.sleep()
        asleep_s, asleep = time.perf_counter() - start, free_bytes()
        start = time.perf_counter()
        learner.wake_up()
        awake_s = time.perf_counter() - start
        check(weights_digest(learner) == before, "other weights woke up than fell asleep")
        learner.train(setting.rows, totals, LR)
    num_parameters = planned.shape_of(setting).num_parameters
    # bfloat16 weights, float32 masters and two moments.
    expected = 14 * num_parameters
    check(asleep - awake > 0.9 * expected, f"only {(asleep - awake) / 1e9:.2f} of {expected / 1e9:.2f} GB became free")
    return {"freed_bytes": asleep - awake, "expected_bytes": expected, "sleep_s": asleep_s, "wake_s": awake_s}


def determinism(setting: Setting) -> dict[str, Any]:
    """Two trainings of the same engine on the same rows end with the same bits, with `reproducible`."""
    digests, spec = [], setting.spec(precision="bfloat16", zero_stage=2)
    for _ in range(2):
        with setting.learner(spec, reproducible=True) as learner:
            run_steps(learner, lambda rows: rows, setting.rows)
            digests.append(weights_digest(learner))
    check(digests[0] == digests[1], "two equal trainings ended with different bits")
    return {"digest": digests[0]}
