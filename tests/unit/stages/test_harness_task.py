"""Tasks of the lm-evaluation-harness that lie on disk, asked of models in this process."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.stages.fake_model import FakeModel
from tests.unit.stages.recorder import FakeRecorder
from xray_runtime.config.lm_eval import LMEvalConfig
from xray_runtime.config.runtime import RuntimeConfig
from xray_runtime.data.rows import Ragged, Rows
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.stages import harness_task
from xray_runtime.stages.artifacts import Model
from xray_runtime.stages.harness_task import numbers_of, read_task
from xray_runtime.stages.inputs import LMEvalInputs
from xray_runtime.stages.kind import Stage

CHOICE = """
task: parity
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: [even, odd]
doc_to_target: "{{answer}}"
target_delimiter: " "
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
REPLY = """
task: echo
dataset_path: json
dataset_kwargs: {data_files: {test: [questions.jsonl]}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "even"
generation_kwargs: {until: ["."], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


class Even(FakeModel):
    """It thinks that everything is even, and says so."""

    def __init__(self, root: Path) -> None:
        self.tokenizer = load_tokenizer(root / "model")
        self.asked: list[tuple[str, str]] = []

    def do_score(self, rows: Rows) -> Rows:
        parts = zip(rows["input_ids"], rows["prompt_lengths"], strict=True)
        said = [(self.tokenizer.decode(ids[:n]), self.tokenizer.decode(ids[n:])) for ids, n in parts]
        self.asked += said
        scores = [-1.0 if "even" in continuation else -2.0 for _, continuation in said]
        return {"loglikelihood": np.array(scores, np.float32), "greedy": np.zeros(len(scores), np.float32)}

    def do_generate(self, rows: Rows, sampling: Any, version: int) -> Rows:
        assert (sampling.top_k, sampling.stop, sampling.max_new_tokens) == (1, (".",), 8)
        ids = self.tokenizer("even. and so on", add_special_tokens=False)["input_ids"]
        return {"response_ids": Ragged.of([ids] * len(rows["seed"]))}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("model", "task"):
        (tmp_path / name).mkdir()
    train_tokenizer(["is 1 2 3 4 even or odd. and so on"] * 5, 300).save_pretrained(tmp_path / "model")
    rows = [{"question": f"is {number}", "answer": number % 2} for number in range(1, 9)]
    rows += [{"question": "is 10", "answer": 0}, {"question": "is 12", "answer": 0}]
    (tmp_path / "task" / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def attempt(root: Path, task: str, **fields: Any) -> tuple[dict[str, Any], Even]:
    pytest.importorskip("lm_eval")
    (root / "task" / "task.yaml").write_text(task)
    model = Even(root)

    @contextlib.contextmanager
    def open_models(specs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        assert set(specs) == ({"generator"} if task is REPLY else {"policy"})
        yield dict.fromkeys(specs, model)

    out = root / f"out-{len(list(root.iterdir()))}"
    out.mkdir()
    config = LMEvalConfig(task=str(root / "task"), **fields)
    recorder = FakeRecorder(out)
    stage = Stage("stage", 7, config, LMEvalInputs(Model(root / "model")), RuntimeConfig(), open_models)
    assert harness_task.run(stage, out, recorder) == 0  # type: ignore[arg-type]
    found: dict[str, Any] = json.loads((out / "benchmark.json").read_text())
    asked = json.loads((out / "prompts.json").read_text())
    assert len(asked) == found["samples"]
    assert all(text.startswith("is ") for text in asked)
    assert recorder.points[-1]["lm_eval/samples"] == found["samples"]
    return found, model


def test_a_task_of_choices(root: Path) -> None:
    found, model = attempt(root, CHOICE)
    # 6 of 10 are even; the standard error of a mean of 0s and 1s is √(p (1 − p) / (n − 1)).
    assert (found["task"], found["samples"], found["acc"]) == ("parity", 10, 0.6)
    error = 1.959964 * math.sqrt(0.6 * 0.4 / 9)
    assert found["acc_ci95"] == pytest.approx([0.6 - error, 0.6 + error], abs=1e-9)
    assert sorted(model.asked)[:2] == [("is 1", " even"), ("is 1", " odd")]
    few, model = attempt(root, CHOICE, limit=2, num_fewshot=0)
    assert (few["samples"], few["acc"], len(model.asked)) == (2, 0.5, 4)


def test_a_task_of_replies(root: Path) -> None:
    found, _ = attempt(root, REPLY)
    assert found["exact_match"] == 1.0


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (
            CHOICE.replace("json\n", "hails/mmlu\n"),
            "dataset_path 'hails/mmlu' in task.yaml is not",
        ),
        (
            CHOICE + "process_docs: !function utils.clean\n",
            "task.yaml cannot be read (could not",
        ),
        (CHOICE.replace("questions.jsonl", "../model/tokenizer.json"), "data file '../model/tokenizer.json' is not in"),
        (CHOICE.replace("questions.jsonl", "https://host/x.jsonl"), "data file 'https://host/x.jsonl' is not in"),
        (CHOICE + "include: other.yaml\n", "`include` in task.yaml is not allowed"),
        (CHOICE.replace("task: parity", ""), "task.yaml must say what its `task` is called"),
        (
            CHOICE.replace("{data_files", "{trust_remote_code: true, data_files"),
            "must have data_files and nothing",
        ),
    ],
)
def test_what_does_not_lie_whole_on_disk_is_refused(task: str, reason: str, root: Path) -> None:
    (root / "task" / "task.yaml").write_text(task)
    with pytest.raises(ValueError, match=r"^x\.task: ") as caught:
        read_task(root / "task", "x.task")
    assert reason in str(caught.value)
    (root / "task" / "second.yaml").write_text(CHOICE)
    with pytest.raises(ValueError, match=r"must be a directory with one \.yaml; it has 2"):
        read_task(root / "task", "x.task")


def test_numbers_are_named_after_their_filter() -> None:
    found = {
        "alias": "x",
        "acc,none": 0.5,
        "acc_stderr,none": "N/A",
        "em,strict": 1,
        "em_stderr,strict": 0.0,
        "sample_len": 4,
    }
    assert numbers_of(found) == {"acc": 0.5, "em_strict": 1.0, "em_strict_ci95": [1.0, 1.0]}
