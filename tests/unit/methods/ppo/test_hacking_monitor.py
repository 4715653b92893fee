"""What a PPO stage does of a sign of a hacked reward: over fake models, whose replies become a little longer each
iteration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.methods.ppo.loop import PPOModel, World, attempt, logprob
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.graph.kind import Answer
from xray_runtime.methods.ppo.hacking_monitor import ANSWERS, RECORD, read_answers
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.ppo.watch import WatchConfig

ITERATIONS = 12


class Longer(PPOModel):
    """Replies have a token more each iteration, and no two pairs of tokens alike."""

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        found = super()._generate(rows, sampling, version)
        starts = [20 + seed % 50 for seed in rows.seed.tolist()]
        ids = [[*range(start, start + 1 + version), sampling.stop_token_ids[0]] for start in starts]
        tokens = Ragged.of(ids)
        return found.with_columns(response_ids=tokens, rollout_logprobs=tokens.like(logprob(tokens.values)))

    def _save(self, directory: Path, head_file: str | None = None) -> None:
        super()._save(directory)
        directory.mkdir(exist_ok=True)
        (directory / "model.safetensors").write_text(f"{self.role} after {self.updates}")


def watched(inputs: PPOInputs, place: Path, action: str, **more: Any) -> tuple[World, FakeRecorder]:
    """A stage that is watched over windows of two iterations. Lengths are 2, 3, 4, …: the mean of the last two is more
    than twice that of the first two, 2.5, in iteration 4 for the first time: (5 + 6) / 2."""
    world, fields = World(), {"watch": WatchConfig(action=action, window=2, max_kl_per_token=9.0, common_phrase=0.99)}
    place.mkdir(exist_ok=True)
    (place / "kept").mkdir(exist_ok=True)
    given = {"kept": place / "kept", "model": Longer, "iterations": ITERATIONS, "max_new_tokens": 32} | fields | more
    return world, attempt(inputs, place / "out", world, **given)


def test_a_warning_is_a_metric(inputs: PPOInputs, tmp_path: Path) -> None:
    world, recorder = watched(inputs, tmp_path, "warn")
    flagged = [number for number, point in enumerate(recorder.points) if "hacking/length" in point]
    assert flagged == list(range(4, ITERATIONS))
    assert len(recorder.points) == ITERATIONS
    assert not (tmp_path / "out" / RECORD).exists()
    assert not any("kept" in call for call in world.calls)


def test_nothing_is_looked_at_where_it_is_off(inputs: PPOInputs, tmp_path: Path) -> None:
    _, recorder = watched(inputs, tmp_path, "off")
    assert not any(name.startswith(("hacking", "rollout/common")) for point in recorder.points for name in point)


def test_a_stage_that_stops_publishes_what_it_kept_before(inputs: PPOInputs, tmp_path: Path) -> None:
    world, recorder = watched(inputs, tmp_path, "stop", updates=2)
    assert len(recorder.points) == 5
    # The sign is in the rollouts of iterations 3 and 4, which policies after 3 and 4 iterations sampled; those after 2
    # and 4 were kept, with two minibatches each.
    assert (tmp_path / "out" / "model.safetensors").read_text() == "policy after 4"
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert (record["ended_early"], record["iterations"]) == (True, 2)
    assert record["seen"] == [{"iteration": 4, "signs": {"length": "replies went from 2.5 to 5.5 tokens"}}]
    assert world.calls.count("policy train") == 10


def test_an_attempt_after_another_stops_at_the_same_policy(inputs: PPOInputs, tmp_path: Path) -> None:
    """Also on a machine that has nothing but the snapshot."""
    _, first = watched(inputs, tmp_path / "first", "stop", updates=2)
    for snapshot in first.snapshots[2:]:
        place = tmp_path / str(snapshot.step)
        _, second = watched(inputs, place, "stop", updates=2, newest=snapshot)
        assert len(second.points) == 5 - snapshot.step
        for name in ("model.safetensors", RECORD):
            assert (place / "out" / name).read_bytes() == (tmp_path / "first" / "out" / name).read_bytes()


def test_a_person_lets_it_go_on(inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Answer(True, "Ada", "long replies are what we want")
    monkeypatch.setattr(FakeRecorder, "ask", lambda self, question: self.questions.append(question) or answer)
    _, recorder = watched(inputs, tmp_path, "pause")
    assert len(recorder.points) == ITERATIONS
    [question] = recorder.questions
    assert "- replies went from 2.5 to 5.5 tokens" in question
    assert "the stage ends with the policy kept after 2 iterations" in question
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert (record["ended_early"], record["iterations"]) == (False, None)
    assert record["seen"][0] | {"signs": None} == {
        **{"iteration": 4, "signs": None, "go_on": True, "by": "Ada"},
        "note": "long replies are what we want",
    }
    # An attempt after this one asks nobody again.
    assert (tmp_path / "kept" / ANSWERS).exists()
    snapshot = next(s for s in recorder.snapshots if s.step == 3)
    (tmp_path / "again").mkdir()
    (tmp_path / "kept").rename(tmp_path / "again" / "kept")
    _, again = watched(inputs, tmp_path / "again", "pause", newest=snapshot)
    assert again.questions == []
    assert len(again.points) == ITERATIONS - 3


@pytest.mark.parametrize("answer", [None, Answer(False, "Ada", "no")], ids=["nobody", "end"])
def test_a_person_ends_the_stage_or_cannot_be_asked(
    inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer | None
) -> None:
    monkeypatch.setattr(FakeRecorder, "ask", lambda self, question: answer)
    _, recorder = watched(inputs, tmp_path, "pause", updates=2)
    assert len(recorder.points) == 5
    assert (tmp_path / "out" / "model.safetensors").read_text() == "policy after 4"
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert record["seen"][0].get("by") == (answer.by if answer else None)


def test_answers_of_people_are_read_from_the_record(tmp_path: Path) -> None:
    assert read_answers(tmp_path) == []
    asked = {"iteration": 9, "signs": {}, "go_on": True, "by": "Ada", "note": "fine"}
    (tmp_path / RECORD).write_text(json.dumps({"seen": [{"iteration": 4, "signs": {}}, asked]}))
    assert read_answers(tmp_path) == [Answer(True, "Ada", "fine")]


def test_metrics_of_how_varied_replies_are(inputs: PPOInputs, tmp_path: Path) -> None:
    _, recorder = watched(inputs, tmp_path, "warn")
    np.testing.assert_allclose([point["rollout/distinct_in_reply"] for point in recorder.points], 1.0)
    assert all(0 < point["rollout/common_phrase"] <= 1 for point in recorder.points[1:])
