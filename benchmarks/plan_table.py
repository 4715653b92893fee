"""Plans of the standard cases: `python -m benchmarks.plan_table` prints docs/planning-table.md.

Models of 0.5 to 70 billion parameters, trained by SFT, DPO, GRPO (also with a lag) and PPO, all weights or LoRA
adapters, on 1 to 64 GPUs of 24, 48, 80 and 141 GB, eight to a node. Nothing runs: each cell is what `runtime.parallel:
auto` chooses there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.cluster.pool.machine import Machine
from xray_runtime.kernel.graph.graph import Graph
from xray_runtime.methods.loading import validate
from xray_runtime.ops.planner.auto import Changes, GraphPlan, plan_call
from xray_runtime.ops.planner.cost import GPUS, Gpu
from xray_runtime.ops.planner.plan import Plan
from xray_runtime.ops.planner.suggestions import suggest

SMALL = ("Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "Qwen/Qwen3-8B")
LARGE = ("Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B")
STAGES = {"sft": "sft", "dpo": "dpo", "grpo": "ppo-1", "lag 1": "ppo-1", "ppo": "ppo-1"}
"""Method → its stage."""
NODE = 8
LEGEND = """# Plans of the standard cases

`python -m benchmarks.plan_table` prints this page: what `runtime.parallel: auto` chooses, and the seconds of one
iteration by the [cost model](planning.md#how-fast), an estimate that no GPU has confirmed. Prompts and replies have
1,024 tokens each (DPO: 512 in a reply). A step of SFT has 64 rows, of DPO 64 pairs; an iteration of GRPO and PPO has
512 replies, in steps of 128. Passes are in bfloat16, weights go straight to the generator, and eight GPUs are a node.
LAG 1 is GRPO with `lag: 1`. PPO has a critic and a reward model as large as the policy.

Z: ZeRO stage. T, P, D: tensor, pipeline and data parallel. k: thousands of tokens of a training pass. R: activations
are recomputed. O: optimizer states are offloaded. G: the generator's tensor parallel × replicas. s: the generator
sleeps in turn; ss: the trained models too. sep: every model has GPUs of its own. Where nothing fits, each of the
changes named would help alone.
"""


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    model: str
    gpu: Gpu
    num_gpus: int
    method: str
    lora: bool

    @property
    def machine(self) -> Machine:
        count = self.num_gpus
        return Machine(num_devices=count, memory_bytes=self.gpu.memory_bytes, devices_per_node=min(count, NODE))


def cases() -> Iterator[Case]:
    """Every cell, row by row."""
    sizes = [(model, gpu, count) for model in SMALL for count in (1, 8) for gpu in GPUS]
    sizes += [(model, gpu, count) for model in LARGE for count in (16, 32, 64) for gpu in GPUS[2:]]
    for model, gpu, count in sizes:
        yield from (Case(model, gpu, count, method, lora) for method in STAGES for lora in (False, True))


def graph_of(case: Case) -> Graph:
    """The lifecycle of a case."""
    training: dict[str, Any] = {"engine": {"precision": "bfloat16"}}
    training |= {"lora": {"rank": 16}} if case.lora else {}
    written: dict[str, Any] = {
        "base": {"kind": "pretrained", "model": case.model},
        "gold": None,
        "data": {"source": "chitchat", "max_prompt_tokens": 1024},
        "sft": {"batch_size": 64, "max_response_tokens": 1024, **training},
        "preferences": None,
        "reward": None,
        "frozen": {"precision": "bfloat16"},
        "runtime": {"device": "cuda", "parallel": "auto", "weight_transfer": "auto"},
    }
    stage = {"minibatch_size": 128, "max_new_tokens": 1024, **training}
    if case.method in ("grpo", "lag 1"):
        groups = {"prompts_per_iteration": 64, "samples_per_prompt": 8, "lag": int(case.method == "lag 1")}
        stages = [{"method": "grpo", **groups, **stage}]
        written |= {"rewards": [{"verifier": {"kind": "regex", "pattern": "x"}}], "ppo": {"stages": stages}}
    elif case.method == "ppo":
        stages = [{"prompts_per_iteration": 512, "critic": "separate", **stage}]
        written |= {"reward_ref": "runs/other#reward", "ppo": {"stages": stages}}
    else:
        pairs = {"source": "dataset", "path": "pairs.jsonl"}
        written |= {"preferences": pairs, "ppo": None, "dpo": {"batch_size": 64, **training}}
    return recorded_graph(validate(written))


def planned(case: Case, graph: Graph, changes: Changes, machine: Machine) -> Plan:
    """The plan of a case's stage."""
    found = plan_call(changes.of_call(graph.calls[STAGES[case.method]]), machine)
    assert found is not None
    return found


def answer(case: Case) -> str:
    """The text of a cell: its plan, or changes that make one fit."""
    graph, stage = graph_of(case), STAGES[case.method]
    found = planned(case, graph, Changes(), case.machine)
    if found.fits:
        return summary(found)

    def planner(changes: Changes, machine: Machine) -> GraphPlan:
        return GraphPlan({stage: planned(case, graph, changes, machine)})

    texts = {
        "num_devices": "{} GPUs",
        "memory_gib": "{} GiB",
        "lora_rank": "LoRA",
        "micro_batch_tokens": "passes of {} tokens",
    }
    changes = suggest(planner, Changes(), GraphPlan({stage: found}))
    return "no: " + ", ".join(texts[change.change].format(change.value) for change in changes)


def summary(plan: Plan) -> str:
    """A plan in a few letters, as the legend has them."""
    trained, sampled = plan.layouts["trained"], plan.layouts["sampled"]
    degrees = "".join(
        f" {n}{size}" for n, size in zip("TPD", (trained.tp, trained.pp, trained.dp), strict=True) if size > 1
    )
    text = f"Z{trained.zero_stage}{degrees} {plan.workload.micro_batch_tokens / 1024:.2g}k"
    text += " R" * plan.recomputes + " O" * plan.offloads
    if plan.workload.of_use("sampled"):
        text += f" G{sampled.tp}×{sampled.dp}" + "s" * (plan.workload.generator_sleeps + plan.workload.trainer_sleeps)
        text += " sep" * (plan.placement == "separate")
    return f"{plan.iteration_s:.2g} s: {text}" if plan.iteration_s < 99.5 else f"{plan.iteration_s:.0f} s: {text}"


def main() -> None:
    columns = [f"{method.upper()}{' LoRA' * lora}" for method in STAGES for lora in (False, True)]
    print(LEGEND)
    print(f"| model | GPUs | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
    row: list[str] = []
    for case in cases():
        row.append(answer(case))
        if len(row) == len(columns):
            name = case.model.split("/")[1]
            print(f"| {name} | {case.num_gpus} {case.gpu.name} | {' | '.join(row)} |", flush=True)
            row = []


if __name__ == "__main__":
    main()
