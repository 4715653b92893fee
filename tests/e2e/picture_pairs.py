"""A flow whose pairs, and whose sampled replies, have pictures in their prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefect import flow

import xray
from examples.squares_vlm import MOST, write_model, write_pictures


def spread(prompts: list[str], replies: list[str]) -> list[float]:
    """A number that tells the replies of an untrained model apart."""
    return [float(sum(map(ord, reply)) % 97) for reply in replies]


@flow(task_runner=xray.task_runner(), persist_result=False)
def picture_pairs(output: str = "runs/picture-pairs", family: str = "qwen3_vl", count: int = 120) -> None:
    """DPO and a reward model on pairs of a file; SFT on the best of sampled replies."""
    pictures, model = Path(output).absolute() / "pictures", Path(output).absolute() / "model"
    rows = write_pictures(pictures, count=count, right=1.0)
    write_model(model, family)
    pairs = rows.with_name("pairs.jsonl")
    pairs.write_text("".join(map(_pair, rows.read_text().splitlines())))
    sampled: dict[str, Any] = {"num_prompts": 16, "max_new_tokens": 4, "generator": {"engine": "transformers"}}
    with xray.workspace(output, project="pairs", seed=0):
        data = xray.prepare(source=str(rows), pictures=str(pictures), columns=["answer"], heldout_fraction=0.2)
        base = xray.base(model=str(model))
        given = xray.preferences(source="dataset", path=str(pairs), pictures=str(pictures), heldout_fraction=0.2)
        xray.dpo(base, preferences=given, batch_size=32, name="dpo")
        xray.reward_model(base, data=given, batch_size=32)
        best = xray.best_of_n(base, prompts=data, rewards=[xray.reward(spread)], samples=2, name="best", **sampled)
        xray.sft(base, data=best, steps=2, batch_size=4, max_response_tokens=8)


def _pair(line: str) -> str:
    row = json.loads(line)
    wrong = str(int(row["answer"]) % MOST + 1)
    return (
        json.dumps({name: row[name] for name in ("image", "prompt")} | {"chosen": row["answer"], "rejected": wrong})
        + "\n"
    )
