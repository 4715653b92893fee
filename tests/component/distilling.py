"""A distillation on real Ray, DeepSpeed and sampling."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.component.models import RUNTIME
from tests.component.processes import open_models
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.pairs import TRAIN, Example, write_pairs
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.methods.distill.config import DistillConfig
from xray_runtime.methods.ppo.body import run
from xray_runtime.methods.ppo.distillation_config import DistillationConfig
from xray_runtime.methods.ppo.kind import PPOInputs

WEIGHTS = "model.safetensors"
SHOWN = json.dumps({"shown": "hello you"})
"""The columns of each row."""


def attempt(
    student: Path,
    teacher: Path | None,
    root: Path,
    *,
    iterations: int,
    newest: Snapshot | None = None,
    temperature: float = 1.0,
    lr: float = 1e-2,
    kept: Path | None = None,
    **distillation: Any,
) -> FakeRecorder:
    config = DistillConfig(
        iterations=iterations,
        prompts_per_iteration=8,
        minibatch_size=4,
        lr=lr,
        schedule="constant",
        max_new_tokens=6,
        temperature=temperature,
        generator=GeneratorConfig(engine="transformers"),
        distillation=DistillationConfig(**distillation),
    )
    root.mkdir()
    texts = ["hello there", "how are you", "fine thanks", "hello", "are you fine", "thanks"]
    write_pairs(
        root / TRAIN,
        Example,
        [Example(str(i), "c", [{"role": "user", "content": t}], "fine", columns=SHOWN) for i, t in enumerate(texts)],
    )
    (root / "dataset.json").write_text('{"max_prompt_tokens": 32}')

    @contextlib.contextmanager
    def opened(specs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with open_models(RUNTIME, root / "logs", specs) as models:
            yield models

    inputs = PPOInputs(Model(student), Dataset(root), teacher=[] if teacher is None else [Model(teacher)])
    recorder = FakeRecorder(root, newest)
    (root / "out").mkdir()
    stage = Stage("distill", 3, config, inputs, RUNTIME, opened, {}, kept)
    run(stage, root / "out", recorder)  # type: ignore[arg-type]
    return recorder
