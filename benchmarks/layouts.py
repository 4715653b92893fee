"""Every training layout against one process: the same PPO updates on the same global batches.

    python -m benchmarks.layouts [--updates 20] [--out docs/layouts.md]

Layouts run one after the other, each on processes of its own (gloo, one thread each).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.held import LoadedLearner, held_bytes, innermost
from benchmarks.ranks import run_ranks
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.micro_batches import as_arrays, as_tensors
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.data.batch import PolicyBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.engines.topology import Topology
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.models.causal_lm import fresh_llama, load_model, save_model
from xray_runtime.models.config import FreshBase, PretrainedBase
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.pretrained_shapes import from_pretrained
from xray_runtime.ops.planner.memory import Layout, Memory, Options, training_memory
from xray_runtime.ops.planner.model_states import sharding_of

BASE = FreshBase(
    vocab_size=320, hidden_size=384, num_layers=4, num_heads=6, num_kv_heads=6, intermediate_size=512, max_positions=64
)
"""4.7M parameters; each matrix has over 100,000 elements, since ZeRO-3 keeps smaller ones whole."""
CONFIG = PPOStageConfig(lr=3e-4, grad_clip=0.5)
MICRO_BATCH_TOKENS = 96
LORA = {"rank": 16}
NUM_BATCHES, NUM_ROWS = 5, 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 process": {},
    **{f"ZeRO-{z} × {n}": {"zero_stage": z, "num_workhorses": n} for z in (1, 2, 3) for n in (2, 4)},
    "TP 2": {"tensor_parallel": 2, "num_workhorses": 2},
    "PP 2": {"pipeline_parallel": 2, "num_workhorses": 2},
    "TP 2 × PP 2 × DP 2, ZeRO-1": {"tensor_parallel": 2, "pipeline_parallel": 2, "num_workhorses": 8, "zero_stage": 1},
    **{f"FSDP2 × {n}": {"library": "fsdp2", "num_workhorses": n} for n in (1, 2, 4)},
    "SP 2, FSDP2": {"library": "fsdp2", "sequence_parallel": 2, "num_workhorses": 2},
    "SP 2, ZeRO-1": {"sequence_parallel": 2, "num_workhorses": 2, "zero_stage": 1},
    "SP 2 × DP 2, ZeRO-3": {"sequence_parallel": 2, "num_workhorses": 4, "zero_stage": 3},
    "Megatron TP 2": {"library": "megatron", "tensor_parallel": 2, "num_workhorses": 2},
    "Megatron TP 2 × DP 2": {"library": "megatron", "tensor_parallel": 2, "num_workhorses": 4},
}
ADAPTED: dict[str, dict[str, Any]] = {
    "LoRA: 1 process": {"lora": LORA},
    "LoRA: ZeRO-3 × 2": {"lora": LORA, "zero_stage": 3, "num_workhorses": 2},
    "LoRA: FSDP2 × 2": {"lora": LORA, "library": "fsdp2", "num_workhorses": 2},
    "LoRA: TP 2": {"lora": LORA, "tensor_parallel": 2, "num_workhorses": 2},
    "LoRA: TP 2 × DP 2, ZeRO-1": {"lora": LORA, "tensor_parallel": 2, "zero_stage": 1, "num_workhorses": 4},
    "LoRA: PP 2": {"lora": LORA, "pipeline_parallel": 2, "num_workhorses": 2},
    "LoRA: Megatron TP 2": {"lora": LORA, "library": "megatron", "tensor_parallel": 2, "num_workhorses": 2},
}
"""Name → fields of the engine, and of `lora`."""
NORMED = {
    name.replace("LoRA", "DoRA"): layout | {"lora": LORA | {"dora": True}}
    for name, layout in ADAPTED.items()
    if name.endswith(("1 process", "ZeRO-3 × 2", ": TP 2", "Megatron TP 2"))
}
MIXTURE = BASE.model_copy(update={"intermediate_size": 256, "num_experts": 4})
MIXTURES: dict[str, dict[str, Any]] = {
    "mixture: 1 process": {},
    "mixture: ZeRO-2 × 2": {"zero_stage": 2, "num_workhorses": 2},
    "mixture: FSDP2 × 2": {"library": "fsdp2", "num_workhorses": 2},
    "mixture: TP 2": {"num_workhorses": 2, "tensor_parallel": 2},
    "mixture: TP 2 × DP 2, ZeRO-1": {"num_workhorses": 4, "tensor_parallel": 2, "zero_stage": 1},
    "mixture: EP 2": {"library": "fsdp2", "num_workhorses": 2, "expert_parallel": 2},
    "mixture: EP 2 × DP 2": {"library": "fsdp2", "num_workhorses": 4, "expert_parallel": 2},
}
EXPERTS_LORA = LORA | {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]}
ADAPTED_MIXTURES: dict[str, dict[str, Any]] = {
    "LoRA on experts: 1 process": {"lora": EXPERTS_LORA},
    "LoRA on experts: ZeRO-2 × 2": {"lora": EXPERTS_LORA, "zero_stage": 2, "num_workhorses": 2},
    "LoRA on experts: ZeRO-3 × 2": {"lora": EXPERTS_LORA, "zero_stage": 3, "num_workhorses": 2},
    "LoRA on experts: FSDP2 × 2": {"lora": EXPERTS_LORA, "library": "fsdp2", "num_workhorses": 2},
    "LoRA on experts: TP 2": {"lora": EXPERTS_LORA, "tensor_parallel": 2, "num_workhorses": 2},
    "LoRA on experts: EP 2": {"lora": EXPERTS_LORA, "library": "fsdp2", "num_workhorses": 2, "expert_parallel": 2},
}
GROUPS = ((BASE, LAYOUTS), (BASE, ADAPTED), (BASE, NORMED), (MIXTURE, MIXTURES), (MIXTURE, ADAPTED_MIXTURES))
"""Models, each with its layouts; the first is what the others are compared with."""


@dataclass(frozen=True)
class LayoutRun:
    """What one layout did: U updates, of R ranks."""

    losses: np.ndarray
    """[U] PPO loss a token, before each update."""
    norms: np.ndarray
    """[U] global gradient norm before clipping."""
    weights: dict[str, np.ndarray]
    """Final trained weights, whole, under Hugging Face names."""
    held: list[dict[str, int]]
    """[R] bytes held before the second optimizer step, when weights, gradients and moments all exist."""
    seconds: float
    """A step's, of all but the first."""


def make_model(directory: Path, base: FreshBase = BASE) -> Path:
    tokenizer = train_tokenizer(["hello there", "how are you today", "fine thanks"] * 20, base.vocab_size)
    lm: Any = fresh_llama(base, tokenizer, seed=1)
    if base.num_experts:
        # Each micro-batch would have a loss of its own, and layouts others.
        lm.config.output_router_logits = False
    save_model(lm, tokenizer, directory)
    return directory


def global_batches(
    model: Path,
    count: int = NUM_BATCHES,
    num_rows: int = NUM_ROWS,
    prompt_tokens: tuple[int, int] = (3, 12),
    reply_tokens: tuple[int, int] = (3, 14),
    group_size: int = 1,
) -> list[TextBatch]:
    """Ragged PPO batches with random advantages; `old_logprobs` near the model's own, so that some ratios clip.

    Lengths are drawn from the first up to, and not with, the second. `group_size` rows have the same prompt.
    """
    rng = np.random.default_rng(0)
    module = HeadedLM(load_model(model), scalar_head=True).eval()
    batches: list[TextBatch] = []
    for _ in range(count):
        prompts = [rng.integers(5, 280, size=rng.integers(*prompt_tokens)) for _ in range(0, num_rows, group_size)]
        prompts = [prompt for prompt in prompts for _ in range(group_size)][:num_rows]
        replies = [rng.integers(5, 280, size=rng.integers(*reply_tokens)) for _ in range(num_rows)]
        rows = TextBatch.of(prompts, replies)
        with torch.no_grad():
            scores = as_arrays(PPOObjective(CONFIG).score(module, as_tensors(rows)))
        logprobs = scores.logprobs

        def like(column: np.ndarray, offsets: np.ndarray = logprobs.offsets) -> Ragged:
            return Ragged(column.astype(np.float32), offsets)

        noise = rng.normal(size=(3, len(logprobs.values)))
        batches.append(
            rows.as_kind(
                PolicyBatch,
                old_logprobs=like(logprobs.values + 0.1 * noise[0]),
                advantages=like(noise[1]),
                weights=like(np.ones(len(logprobs.values))),
                values=scores.values,
                returns=like(noise[2]),
            )
        )
    return batches


def updates(
    learner: Learner, deal: Callable[[TextBatch], TextBatch], batches: list[TextBatch], first: int, last: int
) -> dict[str, Any]:
    """PPO updates number `first` to `last` on one rank."""
    inner = innermost(learner.engine)
    held: dict[str, int] = {}
    # Megatron's engine has an object of its own for what DeepSpeed's does itself.
    stepper = getattr(inner, "_updates", inner)
    step = stepper.apply

    def measured_step(lr: float) -> Any:
        held.update(held_bytes(inner))
        return step(lr)

    losses, norms, seconds = [], [], []
    for number in range(first, last):
        stepper.apply = measured_step if number == first + 1 else step
        rows = batches[number % len(batches)]
        tokens = float(rows.num_response_tokens())
        start = time.perf_counter()
        stats = learner.train(deal(rows), StepTotals(tokens=tokens), CONFIG.lr)
        seconds.append(time.perf_counter() - start)
        losses.append((stats.get("policy_loss", 0.0) + CONFIG.value_coef * stats.get("value_loss", 0.0)) / tokens)
        norms.append(stats["grad_norm"])
    stepper.apply = step
    assert learner.engine is not None
    weights = {name: t.detach().cpu().numpy().copy() for name, t in learner.engine.weights()}
    return {
        "losses": np.array(losses),
        "norms": np.array(norms),
        "weights": weights if learner.engine.turn[0] == 0 else {},
        "held": held,
        "seconds": float(np.mean(seconds[1:])),
    }


def spec_of(model: Path, layout: dict[str, Any], micro_batch_tokens: int = MICRO_BATCH_TOKENS) -> ModelSpec:
    fields = {name: value for name, value in layout.items() if name != "lora"}
    lora = LoRAConfig(**layout["lora"]) if "lora" in layout else None
    training = {"engine": EngineConfig(micro_batch_tokens=micro_batch_tokens, **fields), "lora": lora}
    return ModelSpec(model, PPOObjective(CONFIG), training=CONFIG.model_copy(update=training), new_head=True)


def run_layout(spec: ModelSpec, batches: list[TextBatch], num_updates: int, logs: Path) -> LayoutRun:
    """`num_updates` PPO updates under the layout of `spec`."""
    return collect(spec, run_ranks(spec, logs, updates, batches, 0, num_updates))


def collect(spec: ModelSpec, ranks: list[dict[str, Any]]) -> LayoutRun:
    """One model's run of its ranks'."""
    assert spec.training is not None
    topology = Topology.of(spec.training.engine)
    weights: dict[str, np.ndarray] = {}
    for rank in ranks:
        weights |= rank["weights"]
    return LayoutRun(
        losses=sum(r["losses"] for number, r in enumerate(ranks) if topology.reports(number)),
        norms=ranks[0]["norms"],
        weights=weights,
        held=[r["held"] for r in ranks],
        seconds=max(r["seconds"] for r in ranks),
    )


def differences(run: LayoutRun, alone: LayoutRun) -> tuple[float, float, float]:
    """Largest relative difference from the one-process run: (losses, gradient norms, weights).

    Losses relative to the largest loss, a weight tensor's difference (2-norm) to the tensor.
    """
    assert run.weights.keys() == alone.weights.keys()
    losses = np.abs(run.losses - alone.losses).max() / np.abs(alone.losses).max()
    norms = np.abs(run.norms / alone.norms - 1).max()
    weights = max(
        np.linalg.norm(run.weights[name] - whole) / np.linalg.norm(whole) for name, whole in alone.weights.items()
    )
    return float(losses), float(norms), float(weights)


def most_loading(learner: LoadedLearner, deal: Callable[[TextBatch], TextBatch]) -> int:
    """The most bytes one rank had while it was built."""
    return learner.most_bytes


def predicted(model: Path, layout: dict[str, Any]) -> Memory:
    """The fullest rank, as the planner predicts it; of a trainer whose sharding it does not know as of the default."""
    training = spec_of(model, layout).training
    assert training is not None
    engine = training.engine
    sharding = engine.capabilities.sharding or sharding_of(EngineConfig.default)
    return training_memory(
        from_pretrained(PretrainedBase(model=str(model))),
        4,
        Layout(
            zero_stage=engine.sharding_level,
            tp=engine.tensor_parallel,
            pp=engine.pipeline_parallel,
            dp=engine.data_parallel,
            ep=engine.expert_parallel,
            sp=engine.sequence_parallel,
        ),
        tokens=1,
        positions=1,
        options=Options(
            sharding=sharding,
            lora_rank=None if training.lora is None else training.lora.rank,
            lora_targets=None if training.lora is None else tuple(training.lora.target_modules or ()) or None,
        ),
    )


def table(num_updates: int, only: str = "") -> str:
    """The comparison of the layouts whose names hold `only`, in Markdown."""
    lines = [
        "| layout | loss | gradient norm | weights | held, MB | predicted | loading, MB | predicted | s a step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for base, layouts in GROUPS:
            chosen = [name for name in layouts if only in name]
            if chosen:  # and what they are compared with
                names = dict.fromkeys([next(iter(layouts)), *chosen])
                _rows(root, base, {name: layouts[name] for name in names}, num_updates, lines)
    return "\n".join(lines)


def _rows(root: Path, base: FreshBase, layouts: dict[str, dict[str, Any]], num_updates: int, lines: list[str]) -> None:
    model = make_model(root / str(len(lines)), base)
    batches = global_batches(model)
    alone: LayoutRun | None = None
    for name, layout in layouts.items():
        run = run_layout(spec_of(model, layout), batches, num_updates, root / "logs")
        alone = alone or run
        figures = " | ".join(f"{d:.1e}" if run is not alone else "–" for d in differences(run, alone))
        held = max(sum(rank.values()) for rank in run.held) / 1e6
        loading = max(run_ranks(spec_of(model, layout), root / "logs", most_loading, kind=LoadedLearner)) / 1e6
        memory = predicted(model, layout)
        states = (memory.weights + memory.gradients + memory.optimizer) / 1e6
        most = (memory.weights + memory.loading) / 1e6
        lines.append(
            f"| {name} | {figures} | {held:.1f} | {states:.1f} | {loading:.1f} | {most:.1f} | {run.seconds:.2f} |"
        )
        print(lines[-1], flush=True)


TEXT = """# Training layouts, compared

Made by `python -m benchmarks.layouts --out docs/layouts.md` (CPU, gloo, float32, one thread a process). Under each
layout {updates} PPO updates of a Llama of 4.7M parameters, below of a mixture of four experts, with a value head, on
the same {batches} global batches of {rows} ragged rows, in micro-batches of at most {tokens} tokens. Largest relative
differences from one process:

- *loss*: of any update's loss, relative to the largest loss;
- *gradient norm*: of any update's global norm before clipping;
- *weights*: of any tensor of the final weights (2-norm);
- *held*: bytes of weights, gradients and optimizer states on the fullest rank between backward pass and optimizer step,
  every storage counted once;
- *loading*: the most bytes that torch had allocated on the fullest rank until it could take its first step;
- *predicted*: the planner's formulas (`xray_runtime/ops/planner/memory.py`).

Differences are float32 rounding: sums run in another order, and Adam divides by small numbers. ZeRO-1 to ZeRO-3 keep a
second float32 copy of the weights they step; FSDP2 steps the weights themselves. Megatron also splits the embedding,
which the planner does not count; its pipeline schedules and its distributed optimizer need CUDA and are not in this
table. Adapters (of rank 16), also of experts, are compared with those that one process trains. Ranks of SP,
sequence parallelism, share the tokens of each micro-batch's row of packed sequences, and hold the same states as DP.
Seconds are of all the layout's processes on {cores} cores: they say little of speed on a cluster.

{table}
"""


def main() -> None:
    import os

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--out", type=Path, help="also write the table, with its explanation, to this file")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the layouts whose names hold this")
    options = parser.parse_args()
    rows = table(options.updates, options.only)
    if options.out:
        sizes = {"batches": NUM_BATCHES, "rows": NUM_ROWS, "tokens": MICRO_BATCH_TOKENS}
        cores = len(os.sched_getaffinity(0))
        options.out.write_text(TEXT.format(updates=options.updates, cores=cores, table=rows, **sizes))


if __name__ == "__main__":
    main()
