"""Lesson 2: data of your own. A file of rows, columns that travel with the prompts, and what is held out.

The rows say numbers in words; the model learns to write them in digits. One row in five is held out, and there a
verifier compares each reply with the row's column `answer`.

    xray run examples.lessons.02_own_data:own_data
    xray lineage sft --output runs/own-data           # the file's digest is where it all comes from

Change next: `source=` to a file of yours (.jsonl, .json, .parquet, or a `datasets` name); docs/inputs.md lists forms.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from prefect import flow

import xray

ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def write_numbers(path: Path, count: int = 3000) -> None:
    """Rows of TRL's form `prompt`, `completion`, with a column more."""
    lines = []
    for number in random.Random(0).sample(range(10_000), count):
        digits = f"{number:04}"
        words = " ".join(ONES[int(digit)] for digit in digits)
        lines.append(json.dumps({"prompt": words, "completion": digits, "answer": digits}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


@flow(task_runner=xray.task_runner(), persist_result=False)
def own_data(output: str = "runs/own-data", seed: int = 0, steps: int = 300) -> None:
    """Rows of a file → SFT → the share of held-out rows that come out right.

    Args:
        steps: of SFT.
    """
    rows = Path(output).absolute() / "numbers.jsonl"
    write_numbers(rows)
    with xray.workspace(output, project="own-data", seed=seed):
        data = xray.prepare(source=str(rows), columns=["answer"], min_chars=1, heldout_fraction=0.2)
        base = xray.fresh_base(data, vocab_size=300, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4)
        sft = xray.sft(base, data=data, steps=steps, max_response_tokens=8)
        for name, model in {"before": base, "after": sft}.items():
            xray.benchmark(
                model,
                data,
                suite="pass_at_k",
                verifier={"kind": "regex", "pattern": r"\d+", "column": "answer"},
                samples=1,
                k=[1],
                max_new_tokens=8,
                name=name,
            )
