"""Suites over models in this process that answer with what is worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xray
from tests.unit.methods.ppo import sample_environments
from tests.unit.methods.ppo.fake_model import FakeModel
from tests.unit.methods.stages import ran
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, TextBatch
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.methods.benchmark import body as benchmark
from xray_runtime.methods.benchmark.kind import BENCHMARK, BenchmarkInputs
from xray_runtime.models.causal_lm import load_tokenizer

ASKED = 10


class Answering(FakeModel):
    """A reply to question i, the row-th in all: what `said` says. A token costs as many nats as the row has replies'
    tokens."""

    def __init__(self, root: Path, said: Callable[[str, int], str]) -> None:
        self.tokenizer, self.said, self.count = load_tokenizer(root / "model"), said, 0

    def do_generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        replies = []
        for ids in rows.input_ids:
            question = self.tokenizer.decode(ids)
            text = self.said(question, self.count)
            self.count += 1
            replies.append([*self.tokenizer(text, add_special_tokens=False)["input_ids"], sampling.stop_token_ids[0]])
        ids = Ragged.of(replies)
        logprobs = Ragged(np.full(len(ids.values), -1.0, np.float32), ids.offsets)
        return ReplyBatch(response_ids=ids, rollout_logprobs=logprobs, ended=np.ones(len(replies), bool))

    def do_score(self, rows: TextBatch) -> Scores:
        tokens = rows.input_ids.lengths - rows.prompt_lengths
        return Scores(nll=(tokens * tokens).astype(np.float32))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    texts = [f"question {number}" for number in range(2 * ASKED)]
    train_tokenizer([*texts, "yes no idiot fool"] * 3, 300).save_pretrained(tmp_path / "model")

    def example(number: int) -> Example:
        said = [{"role": "user", "content": texts[number]}]
        return Example(str(number), "c", said, "yes " * (1 + number % 2), columns=json.dumps({"answer": str(number)}))

    write_pairs(tmp_path / "data" / "heldout.arrow", Example, map(example, range(ASKED)))
    write_pairs(tmp_path / "data" / "validation.arrow", Example, map(example, range(ASKED, 2 * ASKED)))
    (tmp_path / "data" / "dataset.json").write_text('{"max_prompt_tokens": 64}')
    return tmp_path


def attempt(root: Path, said: Callable[[str, int], str] = lambda question, row: "yes", **fields: Any) -> dict[str, Any]:
    config = BENCHMARK.validated(fields)
    inputs = BenchmarkInputs(Model(root / "model"), Dataset(root / "data"))
    out, recorder = ran(
        benchmark.run, root, config, inputs, lambda role: Answering(root, said), BENCHMARK.models(config)
    )
    found: dict[str, Any] = json.loads((out / "benchmark.json").read_text())
    asked = json.loads((out / "prompts.json").read_text())
    assert found["samples"] == len(asked) == len(set(asked))
    assert {sample["prompt"] for sample in json.loads((out / "samples.json").read_text())} <= set(asked)
    side = range(ASKED, 2 * ASKED) if fields.get("split") == "validation" else range(ASKED)
    assert set(asked) <= {f"question {number}" for number in side}
    assert recorder.points[-1] == {
        f"benchmark/{name}": value for name, value in found.items() if isinstance(value, int | float)
    }
    return found


def test_perplexity_is_of_all_tokens_together(root: Path) -> None:
    found = attempt(root, suite="perplexity")
    tokens = found["tokens"]
    # Half of the replies have a tokens, half b: (a·a + b·b) / (a + b) nats a token.
    lengths = sorted({len(ids) for ids in _reply_lengths(root)})
    [a, b] = lengths
    assert tokens == ASKED // 2 * (a + b)
    assert found["nll"] == pytest.approx((a * a + b * b) / (a + b), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    assert found["perplexity_ci95"][0] <= found["perplexity"] <= found["perplexity_ci95"][1]
    alone = attempt(root, suite="perplexity", max_response_tokens=a)
    assert (alone["rows"], alone["left_out_too_long"], alone["nll"]) == (ASKED // 2, ASKED // 2, a)
    with pytest.raises(ValueError, match=r"^stage: no row of the dataset fits$"):
        attempt(root, suite="perplexity", max_response_tokens=1)


def _reply_lengths(root: Path) -> list[list[int]]:
    from tests.unit.data.encoding import encode_replies

    return encode_replies(load_tokenizer(root / "model"), ["yes ", "yes yes "])


def test_pass_at_k_of_what_a_verifier_finds_right(root: Path) -> None:
    verifier = {"kind": "regex", "pattern": "yes"}
    # The first two of four replies to each prompt are right: 1 − C(2, 2) / C(4, 2) = 5 / 6.
    found = attempt(
        root,
        lambda question, row: "yes" if row % 4 < 2 else "no",
        suite="pass_at_k",
        verifier=verifier,
        samples=4,
        k=[1, 2, 3],
        split="validation",
    )
    rates = [found[f"pass_at_{k}"] for k in (1, 2, 3)]
    assert rates == pytest.approx([0.5, 5 / 6, 1.0], abs=1e-12)
    assert (found["replies"], found["prompts_checked"]) == (4 * ASKED, ASKED)
    # Each prompt has its own answer in a column.
    answered = attempt(
        root,
        lambda question, row: question.split()[-1].split("<")[0],
        suite="pass_at_k",
        verifier={"kind": "regex", "pattern": r"\d+", "column": "answer"},
        samples=1,
    )
    assert answered["prompts_checked"] == ASKED
    with pytest.raises(ValueError, match=r"verifier.column: 'other' is not a column of the dataset"):
        attempt(root, suite="pass_at_k", verifier={**verifier, "column": "other"})


def test_words_are_whole_whatever_their_case(root: Path) -> None:
    said = ["You IDIOT.", "idiotic", "a fool, idiot", "nice"]
    (root / "worse.txt").write_text("nice\n\n")
    found = attempt(
        root,
        lambda question, row: said[row % 4],
        suite="words",
        lists={"insults": ["idiot", "fool"], "worse": str(root / "worse.txt")},
        num_prompts=8,
    )
    assert (found["insults"], found["worse"], found["replies"]) == (0.5, 0.25, 8)
    assert found["insults_ci95"][0] < 0.5 < found["insults_ci95"][1]
    with pytest.raises(ValueError, match=r"^stage.lists.none: contains no words$"):
        attempt(root, suite="words", lists={"none": [" "]})


def test_episodes_of_an_environment(root: Path) -> None:
    limits = {"max_turns": 8, "max_tokens": 200, "num_workers": 2, "cohorts": 1}
    fields: dict[str, Any] = {
        "suite": "environment",
        "environment": {"path": f"{sample_environments.__name__}:Tells", **limits},
        "samples": 2,
        "success": 2.5,
    }
    # Each turn all episodes that go on say something: the even ones "yes", in their first turn.
    said = attempt(root, lambda question, row: "yes" if row < 2 * ASKED and row % 2 == 0 else "no", **fields)
    # Those about question 3 fail in their second turn. Of the others the rewards are 0 + ½ + 1, and 2 for a yes.
    assert (said["episodes"], said["failed"], said["samples"]) == (2 * ASKED, 1 / ASKED, ASKED)
    assert (said["success"], said["reward"], said["ended"]) == (0.5, 2.5, 1.0)
    assert (said["turns"], said["info/tool_errors"], said["info/is_last"]) == (3.0, 3.0, 1.0)
    assert [name for name in said if name.startswith("info/")] == ["info/is_last", "info/tool_errors"]
    # Each prompt has one of each kind, so resampling prompts changes nothing.
    assert said["success_ci95"] == [0.5, 0.5]
    short = attempt(root, **fields | {"environment": fields["environment"] | {"max_turns": 1}})
    assert (short["success"], short["ended"], short["failed"]) == (0.0, 0.0, 0.0)
    samples = json.loads((root / "out-2" / "samples.json").read_text())
    assert {tuple(sample) for sample in samples} == {("prompt", "episode", "reward")}
    failed = [sample for sample in samples if sample["prompt"] == "question 3"]
    assert [sample["reward"] for sample in failed] == [None]


def test_a_dataset_without_validation_rows_says_so(root: Path) -> None:
    (root / "data" / "validation.arrow").unlink()
    with pytest.raises(ValueError, match=r"^stage.split: the dataset has no validation rows: set data.validation_frac"):
        attempt(root, suite="words", lists={"x": ["x"]}, split="validation")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"suite": "pass_at_k", "verifier": {"kind": "math", "column": "answer"}}, "verifier.column: 'answer' is not"),
        ({"suite": "perplexity", "split": "validation"}, "split: 'validation' is not allowed"),
        (
            {"suite": "pass_at_k", "verifier": {"kind": "regex", "pattern": "x"}, "samples": 2, "k": [3]},
            "k = 3 must be",
        ),
        ({"suite": "mmlu"}, "suite: \"mmlu\" is not allowed: must be one of 'perplexity', "),
    ],
)
def test_impossible_benchmarks_are_refused_in_the_graph(fields: dict[str, Any], reason: str) -> None:
    with recording(), pytest.raises(ConfigError) as caught:
        xray.benchmark(xray.base(model="m"), xray.prepare(source="x.jsonl"), **fields)
    assert reason in str(caught.value)
    with recording():
        known = xray.prepare(source="x.jsonl", columns=["answer"], validation_fraction=0.1)
        # Of a checkpoint nothing is known before it is opened.
        for data in (known, xray.checkpoint("out/checkpoints/prepare-1")):
            for measured in (
                {"suite": "pass_at_k", "verifier": {"kind": "math", "column": "answer"}},
                {"suite": "pass_at_k", "verifier": {"kind": "regex", "pattern": "x"}, "split": "validation"},
            ):
                xray.benchmark(xray.base(model="m"), data, **measured)
    with recording(), pytest.raises(ConfigError, match=r"benchmark\.prompts: is required: a Dataset"):
        xray.benchmark(xray.base(model="m"), suite="perplexity")
