"""What it gives that the last layer's MLP looks at the tokens alone whose states are read.

    python -m benchmarks.read_tokens [--steps 40]

Optimizer steps of one `Learner` in this process, on one thread, with a Llama of 1.6M parameters: in turns with all
tokens and with those that are read. Processor time, which other processes stretch less than seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import line, machine, table
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.pool.libraries import prepare_imports
from xray_runtime.cluster.types import RankInfo
from xray_runtime.cluster.workhorse import reserve_port
from xray_runtime.data.batch import PairBatch, PolicyBatch, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.ppo.config import PPOConfig
from xray_runtime.methods.ppo.objectives import CriticObjective, PPOObjective
from xray_runtime.methods.reward_model.config import RewardConfig
from xray_runtime.models.reward_objective import RewardObjective

SIZES: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 128}
ROWS = 16


def texts(rng: np.random.Generator) -> dict[str, Any]:
    """Prompts of 8 to 19 tokens and replies of 4 to 16."""
    prompts, replies = rng.integers(8, 20, ROWS), rng.integers(4, 17, ROWS)
    ids = Ragged.of(rng.integers(3, 2048, sum(both)) for both in zip(prompts, replies, strict=True))
    return {"input_ids": ids, "prompt_lengths": prompts}


def policy_rows(rng: np.random.Generator) -> PolicyBatch:
    text = texts(rng)
    replies = text["input_ids"].lengths - text["prompt_lengths"]
    names = ("old_logprobs", "advantages", "weights", "values", "returns")
    numbers = {name: Ragged.of((rng.normal(size=count) for count in replies), np.float32) for name in names}
    return PolicyBatch(**text, **numbers)


def pairs(rng: np.random.Generator) -> PairBatch:
    text = texts(rng)
    heads = zip(text["input_ids"], text["prompt_lengths"], strict=True)
    rejected = Ragged.of(np.append(ids[:end], rng.integers(3, 2048, rng.integers(4, 17))) for ids, end in heads)
    return PairBatch(**text, rejected_ids=rejected)


def milliseconds(spec: ModelSpec, rows: TextBatch, steps: int) -> tuple[list[float], list[float]]:
    """Processor time of each step: with all tokens, with those that are read."""
    learner = Learner(RuntimeConfig(device="cpu", threads=1))
    with reserve_port() as port:
        learner.build(spec, RankInfo("model", 0, 0, 1, "127.0.0.1", port.getsockname()[1], None))
    totals = StepTotals.of(rows)
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * steps + 4):
        learner.module._reads_all = number % 2 == 0
        start = time.process_time()
        learner.train(rows, totals, 3e-4)
        if number >= 4:
            found[number % 2].append(1e3 * (time.process_time() - start))
    learner.unload()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    prepare_imports(1)
    ppo, rng = PPOConfig(), np.random.default_rng(0)
    print(f"{machine()}; 1 thread, float32\n")
    table(["step of a", "tokens", "all, ms", "those read, ms", "÷"], [])
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(place)
        cases: dict[str, tuple[Any, Any, TextBatch]] = {
            "policy": (PPOObjective(ppo), ppo, policy_rows(rng)),
            "critic": (CriticObjective(ppo), ppo, policy_rows(rng)),
            "reward model": (RewardObjective(), RewardConfig(), pairs(rng)),
        }
        for name, (objective, training, rows) in cases.items():
            spec = ModelSpec(place, objective, training=training, new_head=name != "policy")
            whole, read = map(statistics.median, milliseconds(spec, rows, options.steps))
            line((name, rows.num_tokens(), f"{whole:.1f}", f"{read:.1f}", f"{read / whole:.2f}"))


if __name__ == "__main__":
    main()
