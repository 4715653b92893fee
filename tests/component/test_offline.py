"""Models that learn from data that lie there, and data out of sampled replies, on real Ray and engines."""

from __future__ import annotations

import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.component.models import RUNTIME
from tests.component.processes import open_models
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.pairs import Example, Pairs, PreferenceExample, write_pairs
from xray_runtime.engines.layouts import EngineConfig, GeneratorConfig
from xray_runtime.kernel.graph.artifacts import Dataset, Model, Preferences
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.methods.best_of_n import body as best_of_n
from xray_runtime.methods.best_of_n.config import BestOfNConfig
from xray_runtime.methods.best_of_n.kind import BestOfNInputs
from xray_runtime.methods.dpo import body as dpo
from xray_runtime.methods.dpo.config import DPOConfig
from xray_runtime.methods.dpo.kind import DPOInputs
from xray_runtime.methods.kto import body as kto
from xray_runtime.methods.kto.config import KTOConfig, KTOValidation
from xray_runtime.methods.kto.kind import KTOInputs
from xray_runtime.rewards.config import reward_term

PAIRS, BATCH, STEPS = 24, 8, 6
"""Two epochs."""


@pytest.fixture
def root(cluster: None, tiny_model: Path, tmp_path: Path) -> Path:
    """model/, pairs/ in which one reply is always the chosen one, and data/ with their prompts."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "manifest.json").write_text("{}")
    words = ["hello", "there", "how", "are", "you", "today"]
    prompts = [[{"role": "user", "content": f"{a} {b}"}] for a in words for b in words if a != b]
    for name in ("pairs", "data"):
        (tmp_path / name).mkdir()
    pairs = [PreferenceExample(str(i), prompt, "fine thanks", "how are") for i, prompt in enumerate(prompts)]
    examples = [Example(str(i), str(i), prompt, "fine") for i, prompt in enumerate(prompts)]
    for of, folder, rows in ((PreferenceExample, "pairs", pairs), (Example, "data", examples)):
        write_pairs(tmp_path / folder / "train.arrow", of, rows[:PAIRS])  # type: ignore[type-var, arg-type]
        write_pairs(tmp_path / folder / "heldout.arrow", of, rows[PAIRS:])  # type: ignore[type-var, arg-type]
    (tmp_path / "data" / "dataset.json").write_text('{"max_prompt_tokens": 40}')
    return tmp_path


def attempt(
    root: Path, name: str, body: Any, config: Any, inputs: Any, newest: Snapshot | None = None, **given: Any
) -> FakeRecorder:
    (root / name).mkdir()
    (root / f"{name}-snapshots").mkdir()
    recorder = FakeRecorder(root / f"{name}-snapshots", newest)
    opened = functools.partial(open_models, RUNTIME, root / "logs")
    body.run(Stage(body.__name__, 7, config, inputs, RUNTIME, opened, **given), root / name, recorder)
    return recorder


def learn(root: Path, name: str, newest: Snapshot | None = None, **fields: Any) -> FakeRecorder:
    config = DPOConfig(**{"batch_size": BATCH, "epochs": 2, "lr": 5e-3, "warmup_fraction": 0.0} | fields)
    return attempt(
        root, name, dpo, config, DPOInputs(Model(root / "model"), Preferences(root / "pairs")), newest=newest
    )


def weights(root: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(root / name / "model.safetensors")


def test_dpo_learns_what_is_preferred_and_goes_on_to_the_same_bytes(root: Path) -> None:
    whole = learn(root, "whole")
    assert len(whole.points) == STEPS
    first, last = whole.points[0], whole.points[-1]
    # It begins at its reference; float32 passes over other micro-batches differ in the last digits.
    assert first["dpo/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert last["dpo/heldout_accuracy"] == 1.0
    assert last["dpo/heldout_margin"] > 0.5
    assert last["dpo/heldout_loss"] < first["dpo/heldout_loss"]
    resumed = learn(root, "resumed", whole.snapshots[3])
    assert resumed.points == whole.points[4:]
    assert (root / "resumed" / "model.safetensors").read_bytes() == (root / "whole" / "model.safetensors").read_bytes()
    # Two Workhorses with small micro-batches: sums in another order, which Adam can enlarge.
    split = learn(root, "split", engine=EngineConfig(num_workhorses=2, micro_batch_tokens=64))
    for point, expected in zip(split.points, whole.points, strict=True):
        assert point["dpo/loss"] == pytest.approx(expected["dpo/loss"], rel=1e-3)
        assert point["dpo/grad_norm"] == pytest.approx(expected["dpo/grad_norm"], rel=1e-3)
    for name, tensor in weights(root, "split").items():
        torch.testing.assert_close(tensor, weights(root, "whole")[name], rtol=1e-3, atol=5e-4)


@pytest.mark.long
def test_dpo_above_a_frozen_trunk(root: Path) -> None:
    recorder = learn(root, "out", trainable_layers=1)
    assert recorder.points[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert recorder.points[-1]["dpo/heldout_accuracy"] == 1.0
    before, after = weights(root, "model"), weights(root, "out")
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all("layers.1." in name or name == "model.norm.weight" for name in moved)


def test_kto_learns_and_its_split_does_not_show(root: Path) -> None:
    inputs = KTOInputs(Model(root / "model"), Preferences(root / "pairs"))
    runs = {}
    for name, engine in {"one": EngineConfig(), "two": EngineConfig(num_workhorses=2, micro_batch_tokens=64)}.items():
        config = KTOConfig(batch_size=2 * BATCH, epochs=2, lr=5e-3, warmup_fraction=0.0, engine=engine)
        runs[name] = attempt(root, name, kto, config, inputs).points[1:]
    assert runs["one"][0]["kto/baseline"] == pytest.approx(0.0, abs=1e-4)
    # 1 − σ(0) of every reply.
    assert runs["one"][0]["kto/loss"] == pytest.approx(0.5, abs=1e-4)
    assert runs["one"][-1]["kto/heldout_accuracy"] == 1.0
    assert max(point["kto/baseline"] for point in runs["one"]) > 0.01
    for one, two in zip(runs["one"], runs["two"], strict=True):
        for metric in ("loss", "baseline", "grad_norm"):
            assert two[f"kto/{metric}"] == pytest.approx(one[f"kto/{metric}"], rel=2e-3, abs=2e-4)


@pytest.mark.long
def test_kto_ends_with_the_best_version_of_replies_left_out(root: Path) -> None:
    validation = KTOValidation(every=1, num_replies=12)
    config = KTOConfig(batch_size=2 * BATCH, epochs=4, lr=5e-3, warmup_fraction=0.0, validation=validation)
    inputs = KTOInputs(Model(root / "model"), Preferences(root / "pairs"))
    points = attempt(root, "out", kto, config, inputs).points[1:]
    losses = [point["kto/validation_loss"] for point in points]
    assert losses[-1] < 0.5
    assert points[-1]["kto/validation_accuracy"] == 1.0
    record = json.loads((root / "out" / "validation.json").read_text())
    assert record["kept"] == 1 + losses.index(min(losses))
    assert 2 <= record["replies"] < 2 * PAIRS


def length(prompts: list[str], replies: list[str]) -> list[float]:
    return [float(len(reply)) for reply in replies]


def test_the_best_of_n_has_the_longest_of_sampled_replies(root: Path) -> None:
    config = BestOfNConfig(
        rewards=[reward_term(function="length")],
        samples=4,
        num_prompts=10,
        max_new_tokens=6,
        truncated="keep",
        generator=GeneratorConfig(engine="transformers"),
    )
    inputs = BestOfNInputs(Model(root / "model"), Dataset(root / "data"))
    for name in ("one", "two"):
        attempt(root, name, best_of_n, config, inputs, functions={"length": length})
    stats = json.loads((root / "one" / "stats.json").read_text())
    examples = list(Pairs(root / "one" / "train.arrow", Example))
    assert len(examples) == stats["kept"] <= 10
    assert len({example.prompt[0]["content"] for example in examples}) == len(examples)
    assert stats["reward_best"] == pytest.approx(sum(len(e.response) for e in examples) / len(examples))
    assert stats["reward_best"] > stats["reward"] + 1
    assert (root / "one" / "train.arrow").read_bytes() == (root / "two" / "train.arrow").read_bytes()
