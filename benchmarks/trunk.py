"""A training step above a frozen trunk whose states are kept, beside one that computes them, of SmolLM2-135M.

    python -m benchmarks.trunk [--steps 4] [--precision bfloat16]

One Learner in this process, without Ray; the two top layers are trained. Both forms train on the same 32 pairs, in
turns: replies of 16 tokens to prompts of 30 to 60, as in `configs/smollm2.yaml`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.machine import line, machine, ratio, spread, table, times
from xray_runtime.config.engines import EngineConfig
from xray_runtime.config.reward_model import RewardConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.data.rows import Ragged, Rows
from xray_runtime.models.causal_lm import load_pretrained, save_model
from xray_runtime.models.reward_objective import RewardObjective
from xray_runtime.workers.learner import Learner
from xray_runtime.workers.model_spec import ModelSpec
from xray_runtime.workers.workhorse import RankInfo, reserve_port

MODEL, LAYERS, PAIRS, REPLY = "smollm2-135m", 2, 32, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--precision", default="bfloat16")
    options = parser.parse_args()
    engine = EngineConfig(precision=options.precision, micro_batch_tokens=4096)
    config = RewardConfig(trainable_layers=LAYERS, batch_size=PAIRS, engine=engine)
    learner, reserved = Learner(RuntimeConfig(device="cpu")), reserve_port()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        lm, tokenizer, files = load_pretrained(MODEL)
        save_model(lm, tokenizer, model, files=files)
        vocabulary = len(tokenizer)
        del lm
        rank_info = RankInfo("reward", 0, 0, 1, "127.0.0.1", reserved.getsockname()[1], None)
        spec = ModelSpec(model, RewardObjective(), training=config, new_head=True, trainable_layers=LAYERS)
        learner.build(spec, rank_info)
    rows = pairs(vocabulary)
    states = {
        column: learner.trunk({"input_ids": rows[name]})["trunk"]
        for name, column in (("input_ids", "trunk"), ("rejected_ids", "rejected_trunk"))
    }

    def step(batch: Rows) -> dict[str, float]:
        return learner.train(batch, {"rows": float(PAIRS)}, 1e-5)

    computed: list[float] = []
    kept: list[float] = []
    for _ in range(options.steps):
        computed += times(lambda: step(rows), 1)
        kept += times(lambda: step(rows | states), 1)
    tokens = sum(len(ids.values) for ids in rows.values())
    megabytes = sum(column.values.nbytes for column in states.values()) / 1e6
    print(f"\n{machine()}; {MODEL}, {LAYERS} layers trained, {options.precision}; {tokens} tokens a step\n")
    table(("states", "seconds a step", "÷ computed", "MB a step"), [])
    line(("computed", spread(computed), "1×", ""))
    line(("kept", spread(kept), ratio(kept, computed), f"{megabytes:.1f}"))


def pairs(vocabulary: int) -> Rows:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(vocabulary, size=rng.integers(30, 61)) for _ in range(PAIRS)]
    sides = ("input_ids", "rejected_ids")
    return {
        name: Ragged.of(np.append(prompt, rng.integers(vocabulary, size=REPLY)) for prompt in prompts) for name in sides
    }


if __name__ == "__main__":
    main()
