"""What an iteration costs where there is next to nothing to compute: calls, rows, records.

    python -m benchmarks.overhead [--iterations 40] [--repeats 3]

A policy of one layer with a hidden size of 32, the smallest head that vLLM's kernels have; 8 replies of at most 4
tokens an iteration, the reward a function. PPO takes 4 optimizer steps with a critic that shares the trunk, GRPO 1.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import xray
from benchmarks.machine import line, machine, spread, table
from benchmarks.peers_measure import steps
from benchmarks.peers_work import share_of_e, write_rows

PHASES = ("sync", "generate", "score", "update", "ledger")
METHODS: dict[str, dict[str, Any]] = {
    "ppo": {"prompts_per_iteration": 8, "epochs": 4},
    "grpo": {"method": "grpo", "prompts_per_iteration": 2, "samples_per_prompt": 4},
}
BASE: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_layers": 1}
BASE |= {"num_heads": 1, "num_kv_heads": 1, "max_positions": 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"{machine()}\n")
    table(("method", "seconds an iteration", *(f"{phase}, s" for phase in PHASES)), [])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "runs"
        with xray.workspace(output, project="overhead"):
            chats = xray.prepare(source=str(write_rows(Path(folder), 200, None)[0]), max_prompt_tokens=96)
            policy = xray.fresh_base(chats, **BASE)
            for method, fields in METHODS.items():
                found: list[dict[str, float]] = []
                for repeat in range(options.repeats):
                    fields |= {"iterations": options.iterations, "name": f"{method}-{repeat}"}
                    fields |= {"minibatch_size": 8, "max_new_tokens": 4, "stop_kl": None, "reward_scaling": "none"}
                    trained = xray.ppo(policy, prompts=chats, rewards=[xray.reward(share_of_e)], **fields)
                    found += steps(trained.result(), output)[1:]
                columns = [[step[name] for step in found] for name in ("seconds", *(f"seconds/{p}" for p in PHASES))]
                line((method, *(spread(seconds) for seconds in columns)))


if __name__ == "__main__":
    main()
