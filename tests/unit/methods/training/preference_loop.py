"""The loops of `dpo`, `kto` and `reward_model` over a model in this process with answers worked out by hand.

The model gives each reply the log-probability −(its tokens); a step of training makes every reply 0.5 nats likelier.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.methods.ppo.fake_model import FakeModel
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.protocols import ModelHandle
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.batch import Scores, StepTotals, TextBatch
from xray_runtime.data.pairs import Example, PreferenceExample, write_pairs
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.store.snapshots import Snapshot

PAIRS, HELDOUT = 10, 3


STEP = 0.5


@dataclass
class World:
    """What happened, in order."""

    calls: list[str] = field(default_factory=list)
    batches: list[tuple[TextBatch, dict[str, float], float]] = field(default_factory=list)


class Likelier(FakeModel):
    """A WholeModel, as far as these loops use it."""

    def __init__(self, directory: Path, world: World) -> None:
        self.name, self.world, self.updates = directory.name, world, 0

    def do_score(self, rows: TextBatch) -> Scores:
        self.world.calls.append(f"{self.name} scores {len(rows)}")
        tokens = rows.input_ids.lengths - rows.prompt_lengths
        bias = -1.0 if self.name == "reference" else STEP * self.updates
        return Scores(reply_logprobs=(bias - tokens).astype(np.float32))

    def do_train(self, rows: TextBatch, totals: StepTotals, lr: float) -> dict[str, float]:
        self.world.calls.append(f"{self.name} learns")
        self.world.batches.append((rows, totals, lr))
        self.updates += 1
        names = ("loss", "correct", "margin", "chosen_logprobs", "rejected_logprobs")
        sums = dict.fromkeys((*names, "desirable_rewards", "undesirable_rewards", "grad_norm"), 2.0)
        return sums

    def do_save(self, directory: Path, head_file: str | None = None) -> None:
        self.world.calls.append(f"{self.name} saves")
        directory.mkdir(exist_ok=True)
        (directory / "updates").write_text(str(self.updates))

    def do_save_state(self, directory: Path) -> None:
        directory.write_text(str(self.updates))

    def do_load_state(self, directory: Path) -> None:
        self.updates = int(directory.read_text())


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def make_root(tmp_path: Path) -> Path:
    """model/ and reference/, pairs/, data/ and judged/."""
    for name in ("model", "reference", "pairs", "data", "judged"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps({"of": name}))
    prompts = [f"question number {number}" for number in range(PAIRS)]
    train_tokenizer([*prompts, "an answer to it", "no"] * 5, 300).save_pretrained(tmp_path / "model")
    pairs = [PreferenceExample(str(i), message(text), f"an answer {i}", "no") for i, text in enumerate(prompts)]
    write_pairs(tmp_path / "pairs" / "train.arrow", PreferenceExample, pairs)
    write_pairs(tmp_path / "pairs" / "heldout.arrow", PreferenceExample, pairs[:HELDOUT])
    held_out = [Example("h", "h", message("held out"), "reply")]
    write_pairs(tmp_path / "data" / "heldout.arrow", Example, held_out)
    said = ["a", "b", "tie", "bad", "skip", "a"]
    asked = ["one", "two", "three", "four", "five", "held out"]
    lines = [
        json.dumps({"prompt": message(p), "a": "yes", "b": "no", "verdict": v})
        for p, v in zip(asked, said, strict=True)
    ]
    (tmp_path / "judged" / "judgements.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def attempt(
    body: Any,
    inputs: Any,
    config: Any,
    out: Path,
    world: World,
    newest: Snapshot | None = None,
    model: type[Likelier] = Likelier,
) -> FakeRecorder:
    @contextlib.contextmanager
    def open_models(specs: Mapping[str, Any]) -> Iterator[dict[str, ModelHandle]]:
        yield {role: model(spec.directory, world) for role, spec in specs.items()}  # type: ignore[misc]

    out.mkdir()
    recorder = FakeRecorder(out, newest)
    body.run(Stage("stage", 7, config, inputs, RuntimeConfig(), open_models), out, recorder)
    return recorder


def plain(batches: list[tuple[TextBatch, dict[str, float], float]]) -> list[Any]:
    def columns(rows: TextBatch) -> dict[str, Any]:
        return {name: c if isinstance(c, np.ndarray) else [c.values, c.offsets] for name, c in rows.columns().items()}

    return [(columns(rows), totals, lr) for rows, totals, lr in batches]
