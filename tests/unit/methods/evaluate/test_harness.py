"""Tasks of the lm-evaluation-harness that lie on disk, asked of models in this process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.message_texts import Messages
from tests.unit.methods.evaluate.harness import CHOICE, REPLY
from tests.unit.methods.ppo.fake_model import FakeModel
from tests.unit.methods.stages import ran
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.kernel.graph.artifacts import Model
from xray_runtime.methods.lm_eval import body as harness_task
from xray_runtime.methods.lm_eval.body import numbers_of
from xray_runtime.methods.lm_eval.config import LMEvalConfig
from xray_runtime.methods.lm_eval.harness_files import read_tasks
from xray_runtime.methods.lm_eval.kind import LM_EVAL, LMEvalInputs
from xray_runtime.models.causal_lm import load_tokenizer


class Even(FakeModel):
    """It thinks that everything is even, and says so."""

    def __init__(self, root: Path) -> None:
        self.tokenizer = load_tokenizer(root / "model")
        self.asked: list[tuple[str, str]] = []

    def do_score(self, rows: TextBatch) -> Scores:
        parts = zip(rows.input_ids, rows.prompt_lengths, strict=True)
        said = [(self.tokenizer.decode(ids[:n]), self.tokenizer.decode(ids[n:])) for ids, n in parts]
        self.asked += said
        scores = [-1.0 if "even" in continuation else -2.0 for _, continuation in said]
        return Scores(loglikelihood=np.array(scores, np.float32), greedy=np.zeros(len(scores), np.float32))

    def do_generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        assert (sampling.top_k, sampling.stop, sampling.max_new_tokens) == (1, (".",), 8)
        ids = self.tokenizer("even. and so on", add_special_tokens=False)["input_ids"]
        return ReplyBatch(response_ids=Ragged.of([ids] * len(rows.seed)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("model", "task"):
        (tmp_path / name).mkdir()
    train_tokenizer(["is 1 2 3 4 even or odd. and so on"] * 5, 300).save_pretrained(tmp_path / "model")
    rows = [{"question": f"is {number}", "answer": number % 2} for number in range(1, 9)]
    rows += [{"question": "is 10", "answer": 0}, {"question": "is 12", "answer": 0}]
    (tmp_path / "task" / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def attempt(root: Path, needed: set[str], **fields: Any) -> tuple[dict[str, Any], Even]:
    pytest.importorskip("lm_eval")
    model = Even(root)

    config = LMEvalConfig(task=str(root / "task"), **fields)
    inputs = LMEvalInputs(Model(root / "model"))
    out, recorder = ran(harness_task.run, root, config, inputs, lambda role: model, needed)
    found: dict[str, Any] = json.loads((out / "benchmark.json").read_text())
    asked = json.loads((out / "prompts.json").read_text())
    assert len(asked) == len(set(asked)) <= found["samples"]
    assert all(text.startswith("is ") for text in asked)
    assert recorder.points[-1]["lm_eval/samples"] == found["samples"]
    return found, model


def test_a_task_of_choices(root: Path) -> None:
    (root / "task" / "task.yaml").write_text(CHOICE)
    found, model = attempt(root, {"policy"})
    # 6 of 10 are even; the standard error of a mean of 0s and 1s is √(p (1 − p) / (n − 1)).
    assert (found["task"], found["samples"], found["acc"]) == ("parity", 10, 0.6)
    error = 1.959964 * math.sqrt(0.6 * 0.4 / 9)
    assert found["acc_ci95"] == pytest.approx([0.6 - error, 0.6 + error], abs=1e-9)
    assert sorted(model.asked)[:2] == [("is 1", " even"), ("is 1", " odd")]
    few, model = attempt(root, {"policy"}, limit=2, num_fewshot=0)
    assert (few["samples"], few["acc"], len(model.asked)) == (2, 0.5, 4)


GROUP = {
    "all.yaml": """
group: all
task: [numbers, echo]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
""",
    "numbers.yaml": """
group: numbers
task: of_numbers
aggregate_metric_list: [{metric: acc, weight_by_size: false}]
""",
    "choice.yaml": CHOICE + "tag: of_numbers\n",
    "odd.yaml": """
include: choice.yaml
task: odd
dataset_kwargs: {data_files: {test: odd.jsonl}}
""",
    "echo.yaml": """
include: echo_template
task: echo
""",
    "echo_template": REPLY.replace("task: echo\n", "tag: of_replies\n"),
}


@pytest.fixture
def group(root: Path) -> Path:
    for name, text in GROUP.items():
        (root / "task" / name).write_text(text)
    rows = [{"question": f"is {number}", "answer": 1} for number in (21, 23)]
    (root / "task" / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_a_task_that_cannot_be_asked_is_refused_as_the_graph_is_written(group: Path) -> None:
    LM_EVAL.check(LMEvalConfig(task=str(group / "task")), {})
    LM_EVAL.check(LMEvalConfig(task="not/here"), {})
    (group / "task" / "all.yaml").unlink()
    with pytest.raises(ValueError, match=r"^task: must hold one task, or one group with all others; it has echo, num"):
        LM_EVAL.check(LMEvalConfig(task=str(group / "task")), {})


def test_a_tag_may_have_a_groups_name(group: Path) -> None:
    tagged = GROUP["choice.yaml"].replace("of_numbers", "[of_numbers, all]")
    (group / "task" / "choice.yaml").write_text(tagged)
    found, _ = attempt(group, {"policy", "generator"})
    assert (found["task"], found["acc"]) == ("all", 0.5)


def test_a_group_is_what_its_tasks_come_to(group: Path) -> None:
    found, model = attempt(group, {"policy", "generator"})
    # parity: 6 of 10, odd: 0 of 2. By documents 6 of 12, by tasks (0.6 + 0) / 2.
    assert (found["task"], found["samples"], found["acc"]) == ("all", 22, 0.5)
    parts = found["parts"]
    assert {name: part.get("acc") for name, part in parts.items()} == {
        "parity": 0.6,
        "odd": 0.0,
        "numbers": 0.3,
        "echo": None,
    }
    assert parts["echo"]["exact_match"] == 1.0
    assert ("is 21", " odd") in model.asked


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("second.yaml", CHOICE.replace("parity", "second")),
        ("second.yaml", CHOICE),
        ("all.yaml", "group: all\ntask: [numbers, echo, mmlu]\n"),
        ("all.yaml", "group: all\ntask: [numbers, echo]\n"),
        ("all.yaml", "group: all\ntask: [{task: echo, dataset_path: x}]\n"),
        ("all.yaml", "group: all\ntask: [echo]\ndataset_path: x\n"),
        ("numbers.yaml", "group: numbers\ntask: [of_numbers, all]\n"),
        ("echo_template", "include: echo.yaml\n"),
    ],
)
def test_a_group_that_is_not_whole_is_refused(group: Path, name: str, text: str, message_texts: Messages) -> None:
    (group / "task" / name).write_text(text)
    with message_texts.raises(ValueError):
        read_tasks(group / "task", "x.task")


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (CHOICE.replace("json\n", "hails/mmlu\n"), "dataset_path 'hails/mmlu' in task.yaml is not"),
        (CHOICE + "process_docs: !function utils.clean\n", "task.yaml cannot be read (could not"),
        (CHOICE.replace("questions.jsonl", "https://host/x.jsonl"), "data file 'https://host/x.jsonl' is not in"),
        (CHOICE + "include: ../other.yaml\n", "included file '../other.yaml' is not in"),
        (CHOICE + "class: tests.Task\n", "`class` in task.yaml is not allowed"),
        (CHOICE.replace("task: parity", ""), "task.yaml must name its `task`"),
        (CHOICE.replace("{data_files", "{trust_remote_code: true, data_files"), "must have data_files and nothing"),
    ],
)
def test_incomplete_tasks_are_refused(task: str, reason: str, root: Path) -> None:
    (root / "task" / "task.yaml").write_text(task)
    with pytest.raises(ValueError, match=r"^x\.task: ") as caught:
        read_tasks(root / "task", "x.task")
    assert reason in str(caught.value)
    (root / "task" / "task.yaml").unlink()
    with pytest.raises(ValueError, match=r"must be a directory with the \.yaml of a task; it has none"):
        read_tasks(root / "task", "x.task")


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
