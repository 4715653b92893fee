"""The stage `evaluate` over models in this process: who judges, and what is only shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.methods.ppo import sample_environments
from tests.unit.methods.ppo.fake_model import FakeModel
from tests.unit.methods.ppo.recorder import FakeRecorder
from tests.unit.methods.stages import ran
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Scores, TextBatch
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import train_tokenizer
from xray_runtime.kernel.graph.artifacts import Dataset, Model, RewardModel
from xray_runtime.methods.evaluate import body as evaluate
from xray_runtime.methods.evaluate.config import EvaluationConfig
from xray_runtime.methods.evaluate.kind import EVALUATE, EvaluateInputs
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.rewards import reward_models

PROMPTS = 8
SYSTEM = [{"role": "system", "content": "Be brief."}]
SAID = ("no", "yes")
"""What each version of the policy replies."""


class Judged(FakeModel):
    """A WholeModel, as far as this stage uses it: the trained reward model likes yes, the judge likes no."""

    def __init__(self, role: str, root: Path) -> None:
        self.role, self.tokenizer = role, load_tokenizer(root / "before")

    def do_generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        reply = [*self.tokenizer(SAID[version], add_special_tokens=False)["input_ids"], sampling.stop_token_ids[0]]
        count = len(rows.seed)
        ids = Ragged.of([reply] * count)
        logprobs = Ragged(np.full(len(ids.values), -1.0, np.float32), ids.offsets)
        return ReplyBatch(response_ids=ids, rollout_logprobs=logprobs, ended=np.ones(count, bool))

    def do_load_checkpoint(self, directory: Path, version: int) -> None:
        assert (directory.name, version) == ("after", 1)

    def do_sleep(self) -> None:
        assert self.role == "generator"

    def do_release_memory(self) -> None:
        assert self.role in ("before", "after")

    def do_score(self, rows: TextBatch) -> Scores:
        if self.role.startswith(("rewards", "judges")):
            likes, cut = SAID[self.role.startswith("rewards")], rows.prompt_lengths
            texts = [self.tokenizer.decode(ids[n:]) for ids, n in zip(rows.input_ids, cut, strict=True)]
            return Scores(scores=np.array([3.0 if likes in text else 1.0 for text in texts], np.float32))
        lengths = rows.input_ids.lengths - rows.prompt_lengths
        each = np.full(lengths.sum(), -1.0 if self.role == "after" else -1.5, np.float32)
        return Scores(ref_logprobs=Ragged(each, np.concatenate([[0], lengths.cumsum()])))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # A reward model that works would not give so many replies one score.
    monkeypatch.setattr(reward_models, "MIN_DISTINCT_TEXTS", PROMPTS + 1)
    texts = [f"question {number}" for number in range(PROMPTS)]
    for name in ("before", "after", "reward", "judge"):
        (tmp_path / name).mkdir()
        train_tokenizer([*texts, "yes no"] * 3, 300).save_pretrained(tmp_path / name)
        (tmp_path / name / "reward.json").write_text('{"mean": 1.0, "std": 2.0}')
    (tmp_path / "data").mkdir()
    rows = [
        Example(str(i), "c", [*SYSTEM, {"role": "user", "content": text}], "x", columns=f'{{"task": "task {i}"}}')
        for i, text in enumerate(texts)
    ]
    write_pairs(tmp_path / "data" / "heldout.arrow", Example, rows)
    (tmp_path / "data" / "dataset.json").write_text('{"max_prompt_tokens": 64}')
    return tmp_path


def long(prompts: Sequence[str], replies: Sequence[str]) -> list[float]:
    return [float(len(reply)) for reply in replies]


def evaluated(
    root: Path, judges: list[dict[str, Any]], function: Any = long, **fields: Any
) -> tuple[dict[str, Any], FakeRecorder]:
    given = {"rewards": [{"model": "rewards.0"}], "judges": judges, "num_prompts": PROMPTS, "bootstrap_samples": 100}
    config = EvaluationConfig.model_validate(given | fields)
    models = [RewardModel(root / "judge")] if any(term.get("model") for term in judges) else []
    policies = Model(root / "after"), Model(root / "before")
    inputs = EvaluateInputs(*policies, Dataset(root / "data"), [RewardModel(root / "reward")], models)
    functions, roles = {"f": function}, EVALUATE.models(config)
    out, recorder = ran(
        evaluate.run, root, config, inputs, lambda role: Judged(role, root), roles, "evaluate", functions=functions
    )
    found: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
    found["shown"] = json.loads((out / "samples.json").read_text())
    return found, recorder


def test_the_judge_says_who_wins_and_the_reward_is_shown(root: Path) -> None:
    found, recorder = evaluated(root, [{"model": "judges.0"}, {"function": "f"}, {"function": "f", "weight": -1.0}])
    # The reward, in its own deviations, rises from (1 − 1) / 2 to (3 − 1) / 2; the judge always prefers the other.
    assert (found["reward_before"], found["reward_after"], found["reward_delta"]) == (0.0, 1.0, 1.0)
    judges = found["judges"]
    assert {name: (said["win_rate"], said["score_before"], said["score_after"]) for name, said in judges.items()} == {
        "judges.0": (0.0, 1.0, 0.0),
        "f": (1.0, 2.0, 3.0),  # yes is longer than no
        "f-2": (0.0, -2.0, -3.0),
    }
    assert (found["judge"], found["win_rate"], found["win_rate_ci95"]) == ("judges.0", 0.0, [0.0, 0.0])
    # Half a nat for each of its tokens.
    assert found["kl"] == pytest.approx(0.5 * found["length_after"])
    assert recorder.points[-1]["evaluate/win_rate"] == 0.0
    assert {(s["reward_after"], s["judges.0_after"], s["f_before"]) for s in found["shown"]} == {(1.0, 0.0, 2.0)}


def test_without_a_judge_no_side_wins(root: Path) -> None:
    found, recorder = evaluated(root, [])
    assert (found["win_rate"], found["judge"], found["judges"], found["reward_delta"]) == (None, None, {}, 1.0)
    assert "evaluate/win_rate" not in recorder.points[-1]


def test_a_judge_may_lack_few_scores(root: Path) -> None:
    def sometimes(prompts: Sequence[str], replies: Sequence[str]) -> list[float | None]:
        return [None if prompt.endswith("3") else 1.0 for prompt in prompts]

    with pytest.raises(RuntimeError, match=r"evaluate: 1 of 8 replies have no reward; f failed for 1"):
        evaluated(root, [{"function": "f"}], sometimes, max_failed=0.1)
    found, _ = evaluated(root, [{"function": "f"}], sometimes, max_failed=0.2)
    assert (found["judges"]["f"]["samples"], found["win_rate"]) == (7, 0.5)


def test_a_judge_reads_the_whole_conversation_and_its_columns(root: Path) -> None:
    seen = []

    def judge(prompts: Sequence[str], replies: Sequence[str], task: Sequence[str], messages: Any) -> list[float]:
        seen.extend((said[0]["content"], said[-1]["content"], name) for said, name in zip(messages, task, strict=True))
        return [1.0] * len(replies)

    evaluated(root, [{"function": "f"}], judge)
    assert sorted(seen) == sorted([("Be brief.", f"question {i}", f"task {i}") for i in range(PROMPTS)] * 2)


def test_equal_replies_tie(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that says what it said before wins and loses nothing, though models and judges score it anew."""
    calls = 0

    def moody(prompts: Sequence[str], replies: Sequence[str]) -> list[float]:
        nonlocal calls
        calls += 1
        return [float(calls + row) for row in range(len(replies))]

    class Rounds(Judged):
        def do_score(self, rows: TextBatch) -> Scores:
            scores = super().do_score(rows)
            if "scores" not in scores:
                return scores
            more = np.float32(1e-6) * (moody([], ["x"] * len(scores))[0])
            return scores.with_columns(scores=scores.scores + more)

    monkeypatch.setitem(globals(), "Judged", Rounds)
    judges: list[dict[str, Any]] = [{"model": "judges.0"}, {"function": "f"}]
    differ, _ = evaluated(root, judges, moody)
    assert {name: said["win_rate"] for name, said in differ["judges"].items()} == {"judges.0": 0.0, "f": 1.0}
    monkeypatch.setitem(globals(), "SAID", ("yes", "yes"))
    alike, _ = evaluated(root, judges, moody)
    assert (alike["reward_delta"], alike["reward_delta_ci95"]) == (0.0, [0.0, 0.0])
    for said in alike["judges"].values():
        assert (said["win_rate"], said["win_rate_ci95"], said["delta"]) == (0.5, [0.5, 0.5], 0.0)
        assert (said["won"], said["lost"], said["tied"]) == (0, 0, PROMPTS)


def test_episodes_with_an_environment(root: Path) -> None:
    path = f"{sample_environments.__name__}:Tells"
    fields: dict[str, Any] = {"environment": {"path": path, "num_workers": 1}, "rewards": [], "max_failed": 0.2}
    found, recorder = evaluated(root, [{"function": "f"}], **fields)
    # Three turns earn 0 + ½ + 1, and each yes two more. That about question 3 fails, and its pair is left out.
    assert (found["reward_before"], found["reward_after"], found["reward_delta_ci95"]) == (1.5, 7.5, [6.0, 6.0])
    assert (found["turns_before"], found["info/tool_errors_after"], found["samples"]) == (3.0, 3.0, PROMPTS)
    # The environment rewards; who wins is the judge's to say, of what the policy itself said, a line a turn.
    assert (found["judge"], found["judges"]["f"]["score_after"]) == ("f", (7 * 11 + 7) / PROMPTS)
    # What it read between its turns is neither in the length nor in the KL: 7 × 3 turns and 2 of two tokens each.
    assert found["length_after"] == (7 * 3 + 2) * 2 / PROMPTS
    assert found["kl"] == pytest.approx(0.5 * found["length_after"])
    assert {shown["before"] for shown in found["shown"] if shown["reward_before"]} <= {
        f"no [go on {number}] no [go on {number}] no" for number in range(10)
    }
    assert recorder.points[-1]["evaluate/turns_after"] == 3.0
