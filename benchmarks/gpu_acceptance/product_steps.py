"""Steps through the product's actors: policy and generator in turn on one GPU, and a whole run by its command."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu_acceptance import planned
from benchmarks.gpu_acceptance.generation_steps import SYNC_LR, max_length, prompts, sampling
from benchmarks.gpu_acceptance.setting import Setting, check, free_bytes
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.data.batch import StepTotals

ITERATIONS = 3
"""The last sync brings weights that the generator dropped: those of the second, which were all."""
RUN_LIMIT_S = 280.0


def in_turn(setting: Setting) -> dict[str, Any]:
    """Iterations in which policy and generator sleep in turn on one GPU, each phase within the plan's peak."""
    import ray

    from benchmarks.machine import start_ray
    from xray_runtime.cluster.opening import model_opener
    from xray_runtime.methods.common.sampling.turns import sampling_turn

    spec = setting.spec(precision="bfloat16", zero_stage=1)
    plan = planned.in_turn(setting, spec)
    [generator_bytes] = [p.memory.total for p in plan.roles if p.role.use == "sampled"]
    runtime = setting.runtime(
        gpus_per_workhorse=0.5,
        generator_sleeps=True,
        trainer_sleeps=True,
        gpu_memory_fraction=math.ceil(100 * generator_bytes / plan.machine.memory_bytes) / 100,
        max_num_seqs=setting.size.num_rows,
    )
    specs: dict[str, Any] = {"generator": GeneratorSpec(setting.model, max_length(setting)), "policy": spec}
    totals, before = StepTotals(tokens=float(setting.rows.num_response_tokens())), free_bytes()
    most: dict[str, int] = {}
    seconds: dict[str, float] = {}
    start_ray(num_cpus=4)
    with model_opener(runtime, setting.folder / "in-turn", "gpu-acceptance")(specs) as models:

        def phase(name: str, call: Any) -> None:
            begin = time.perf_counter()
            ray.get(call)
            seconds[f"{name}_s"] = time.perf_counter() - begin
            # Memory held when a phase ends; the peak in between is the allocators' own.
            most[name] = max(most.get(name, 0), before - free_bytes())

        for version in range(ITERATIONS):
            if version:
                phase("sync", models["generator"].follow.remote(models["policy"], version))
            with sampling_turn(runtime, models["generator"], [models["policy"]], synced_next=True):
                phase("generate", models["generator"].generate.remote(prompts(setting), sampling(setting), version))
            phase("train", models["policy"].train.remote(setting.rows, totals, SYNC_LR))
    ray.shutdown()
    peak = plan.fullest.peak_bytes
    for name, held in most.items():
        check(held <= peak, f"{name} holds {held / 1e9:.2f} GB, more than the planned {peak / 1e9:.2f}")
    shares = {f"planned_{name}_s": value for name, value in plan.seconds.items()}
    return {"planned_bytes": peak} | {f"{name}_bytes": held for name, held in most.items()} | seconds | shares


def run(setting: Setting) -> dict[str, Any]:
    """`xray run` of the smallest lifecycle, which ends with an evaluated policy."""
    out = setting.folder / "run"
    command = [sys.executable, "-c", "from xray.cli.main import main; main()", "run", "configs/tiny.yaml"]
    command += ["--set", f"runtime.device={setting.device}", "--output", str(out)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    check(done.returncode == 0, f"xray run ended with {done.returncode}: {done.stderr[-300:].strip()}")
    check((out / "report.html").exists(), "xray run wrote no report.html")
    return {"run_s": time.perf_counter() - start}
