"""Tasks of the lm-evaluation-harness on real engines, beside the harness's own model on plain transformers."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.component.models import RUNTIME
from tests.component.processes import open_models
from tests.unit.methods.evaluate.harness import CHOICE, REPLY
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.stage import Stage
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.kernel.graph.artifacts import Model
from xray_runtime.methods.lm_eval import body as harness_task
from xray_runtime.methods.lm_eval.config import LMEvalConfig
from xray_runtime.methods.lm_eval.harness_files import read_tasks
from xray_runtime.methods.lm_eval.kind import LMEvalInputs

ASKED = ["hello there", "how are you", "fine thanks", "how are you today", "hello", "are you there"]


@pytest.fixture
def root(cluster: None, tiny_model: Path, tmp_path: Path) -> Path:
    """model/ and task/, without its .yaml."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "task").mkdir()
    rows = [{"question": text, "answer": number % 2} for number, text in enumerate(ASKED)]
    (tmp_path / "task" / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def ours(root: Path) -> dict[str, Any]:
    (root / "out").mkdir()
    opened = functools.partial(open_models, RUNTIME, root / "logs")
    config = LMEvalConfig(task=str(root / "task"), max_length=48, generator=GeneratorConfig(engine="transformers"))
    stage = Stage("task", 7, config, LMEvalInputs(Model(root / "model")), RUNTIME, opened)
    harness_task.run(stage, root / "out", FakeRecorder(root / "out"))
    found: dict[str, Any] = json.loads((root / "out" / "benchmark.json").read_text())
    samples = json.loads((root / "out" / "samples.json").read_text())
    return found | {"answers": {sample["prompt"]: json.loads(sample["answer"]) for sample in samples}}


def theirs(root: Path) -> dict[str, Any]:
    """The same by the harness alone."""
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    asked, files = read_tasks(root / "task", "task"), root / "files"
    files.mkdir()
    asked.write(files, root / "cache")
    own = HFLM(model, tokenizer=tokenizer, device="cpu", batch_size=1, max_length=48, add_bos_token=False)
    found = simple_evaluate(
        own, tasks=[asked.name], task_manager=TaskManager(include_path=str(files), include_defaults=False)
    )
    [name] = found["samples"]
    answers = {row["arguments"][0][0]: row["filtered_resps"] for row in found["samples"][name]}
    return harness_task.numbers_of(found["results"][name]) | {"answers": answers}


def test_likelihoods_are_those_of_plain_transformers(root: Path) -> None:
    (root / "task" / "task.yaml").write_text(CHOICE)
    found, expected = ours(root), theirs(root)
    assert found["acc"] == expected["acc"]
    assert found["answers"].keys() == expected["answers"].keys() == set(ASKED)
    for prompt, answers in expected["answers"].items():
        for (value, greedy), (loglikelihood, likeliest) in zip(found["answers"][prompt], answers, strict=True):
            assert value == pytest.approx(loglikelihood, abs=1e-3)
            assert greedy == likeliest


def test_greedy_replies_are_those_of_plain_transformers(root: Path) -> None:
    (root / "task" / "task.yaml").write_text(REPLY)
    found, expected = ours(root), theirs(root)
    assert found["exact_match"] == expected["exact_match"]
    assert found["answers"] == expected["answers"]
    assert len({str(answer) for answer in found["answers"].values()}) > 1
