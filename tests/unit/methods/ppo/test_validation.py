"""Validation inside PPO's loop over models in this process: what is looked at, and which version is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xray
from tests.unit.methods.ppo import sample_environments
from tests.unit.methods.ppo.loop import KL_PER_TOKEN, PPOModel, World, attempt, words
from xray_runtime.data.batch import Scores, TextBatch
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.layouts import FrozenConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Dataset
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.kernel.store.snapshots import Snapshot
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.rewards import reward_models
from xray_runtime.rewards.config import reward_term
from xray_runtime.rewards.term import SourceRoute

SYSTEM = [{"role": "system", "content": "Be brief."}]
ASKED = 3
JUDGED = [1.0, 5.0, 5.0, 2.0]
"""What the judge says of all replies of each version."""


class Saving(PPOModel):
    """Saves which version it is."""

    def _save(self, directory: Path, head_file: str | None = None) -> None:
        super()._save(directory, head_file)
        (directory / "updates").write_text(str(self.updates))

    def _generate(self, rows: Any, sampling: Any, version: int) -> Any:
        if len(rows.seed) == ASKED:
            self.world.seeds.append(-1)  # of validation
        return super()._generate(rows, sampling, version)


class Judge:
    """Scores by the version that was looked at last."""

    def __init__(self, verdicts: Sequence[float] = JUDGED, first: int = 0) -> None:
        self.verdicts, self.calls = verdicts, first

    def __call__(self, prompts: Sequence[str], replies: Sequence[str]) -> list[float]:
        assert all("validation" in prompt for prompt in prompts)
        self.calls += 1
        return [self.verdicts[self.calls - 1]] * len(replies)


@pytest.fixture
def validated(inputs: PPOInputs, tmp_path: Path) -> PPOInputs:
    """The same inputs, with three prompts to choose by."""
    data = tmp_path / "data"
    data.mkdir()
    for path in inputs.prompts.path.iterdir():
        if path.is_file():
            (data / path.name).write_bytes(path.read_bytes())
    rows = [
        Example(
            f"v{i}",
            "v",
            [*SYSTEM, {"role": "user", "content": f"validation {i}"}],
            "x",
            columns=f'{{"task": "task {i}"}}',
        )
        for i in range(ASKED)
    ]
    write_pairs(data / "validation.arrow", Example, rows)
    return replace(inputs, prompts=Dataset(data))


def trained(
    inputs: PPOInputs,
    out: Path,
    judge: Callable[..., Any] | None,
    newest: Snapshot | None = None,
    kept: Path | None = None,
    **fields: Any,
) -> tuple[World, Any, dict[str, Any]]:
    world, kept = World(), kept or out.parent / "kept"
    kept.mkdir(exist_ok=True)
    terms = {"judges": [reward_term(function="judge")]} if judge is not None else {}
    given: dict[str, Any] = {"iterations": 3, "validation": {"every": 1}, "model": Saving} | terms | fields
    functions = {"judge": judge} if judge is not None else None
    recorder = attempt(
        inputs, out, world, newest=newest, kept=kept, functions=functions,
        ends_with_last=False, **given,
    )  # fmt: skip
    return world, recorder, json.loads((out / "validation.json").read_text())


def test_the_first_of_the_best_versions_is_kept(validated: PPOInputs, tmp_path: Path) -> None:
    world, recorder, record = trained(validated, tmp_path / "out", Judge())
    assert record == {"kept": 1, "prompts": 3, "scored_by": ["judge"], "scores": dict(zip("0123", JUDGED, strict=True))}
    # Two minibatch steps make a version.
    assert (tmp_path / "out" / "updates").read_text() == "2"
    assert [point["validation/score"] for point in recorder.points] == JUDGED[:3]
    assert [point["validation/best"] for point in recorder.points] == [0, 1, 1]
    assert [point["validation/version"] for point in recorder.points] == [0, 1, 2]
    # Looked at before each update and after the last, by the weights of that version.
    generated = [call for call in world.calls if call.startswith(("generator", "policy save"))]
    assert generated == [
        *["generator probe 0", "generator generate 0", "policy save best-000000.writing"],
        *["generator follow 1", "generator probe 1", "generator generate 1", "policy save best-000001.writing"],
        *["generator follow 2", "generator probe 2", "generator generate 2"],
        *["generator follow 3", "generator probe 3"],
    ]


def test_the_last_is_kept_where_it_is_the_best_or_wanted(validated: PPOInputs, tmp_path: Path) -> None:
    _, _, record = trained(validated, tmp_path / "best", Judge([1.0, 2.0, 3.0, 4.0]), kept=tmp_path / "a")
    assert (record["kept"], (tmp_path / "best" / "updates").read_text()) == (3, "6")
    fields = {"validation": {"every": 2, "keep": "last"}}
    _, recorder, record = trained(validated, tmp_path / "last", Judge([9.0, 1.0, 1.0]), kept=tmp_path / "b", **fields)
    assert (record["kept"], (tmp_path / "last" / "updates").read_text()) == (3, "6")
    assert list(record["scores"]) == ["0", "2", "3"]
    assert ["validation/score" in point for point in recorder.points] == [True, False, True]
    assert not list((tmp_path / "b").glob("best-*"))


def test_looking_changes_nothing_that_is_trained(validated: PPOInputs, tmp_path: Path) -> None:
    looked, _, _ = trained(validated, tmp_path / "looked", Judge())
    alone = World()
    attempt(validated, tmp_path / "alone", alone, iterations=3)
    assert [rows.id.tolist() for _, rows, *_ in looked.batches] == [r.id.tolist() for _, r, *_ in alone.batches]
    for (_, rows, *_), (_, other, *_) in zip(looked.batches, alone.batches, strict=True):
        assert rows.input_ids.values.tolist() == other.input_ids.values.tolist()


def test_without_judges_the_rewards_score(validated: PPOInputs, tmp_path: Path) -> None:
    _, recorder, record = trained(validated, tmp_path / "out", None)
    assert record["scored_by"] == ["rewards.0"]
    assert {point["validation/score"] for point in recorder.points} == {record["scores"]["0"]}  # the same seeds


def test_in_an_environment_its_episodes_are_looked_at(validated: PPOInputs, tmp_path: Path) -> None:
    """Whichever version: the same seeds begin the same episodes, each with its rewards 0, ½ and 1."""
    environment = {"path": f"{sample_environments.__name__}:ThreeTurns", "num_workers": 1}
    fields: dict[str, Any] = {"environment": environment, "rewards": [], "iterations": 1}
    _, recorder, record = trained(validated, tmp_path / "out", None, **fields)
    assert record == {"kept": 0, "prompts": 3, "scored_by": ["environment"], "scores": {"0": 1.5, "1": 1.5}}
    assert recorder.points[0]["validation/score"] == 1.5
    _, _, judged = trained(validated, tmp_path / "judged", Judge([1.0, 2.0]), kept=tmp_path / "other", **fields)
    assert (judged["scored_by"], judged["scores"]) == (["judge"], {"0": 1.0, "1": 2.0})


def test_judges_read_columns_of_the_rows_they_look_at(validated: PPOInputs, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def judge(prompts: Sequence[str], replies: Sequence[str], task: Sequence[str], messages: Any) -> list[float]:
        assert [said[0]["content"] for said in messages] == ["Be brief."]
        asked.append([f"{prompt[-1]} {name}" for prompt, name in zip(prompts, task, strict=True)])
        return [1.0] * len(replies)

    judging = reward_term(function="judge", when=SourceRoute(column="task", equals="task 1"))
    trained(validated, tmp_path / "out", judge, judges=[judging], iterations=1)
    assert asked == [["1 task 1"]] * 2


class OnTrunk(Saving):
    """A policy that holds reference and reward model too."""

    def _score(self, rows: TextBatch) -> Scores:
        found = super()._score(rows)
        below = Ragged(found.logprobs.values - np.float32(KL_PER_TOKEN), found.logprobs.offsets)
        return found.with_columns(ref_logprobs=below, **{"rewards.0": (words(rows) % 5).astype(np.float32)})


def test_a_reward_model_on_the_policys_trunk_scores_the_same(
    validated: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, apart, of_its_own = trained(validated, tmp_path / "own", None)
    monkeypatch.setattr(reward_models, "same_trunk", lambda path, *trunk: True)
    fields = {"trainable_layers": 1, "model": OnTrunk}
    world, together, record = trained(validated, tmp_path / "trunk", None, kept=tmp_path / "k", **fields)
    assert record == of_its_own
    assert [p["validation/length"] for p in together.points] == [p["validation/length"] for p in apart.points]
    assert not any("rewards" in call for call in world.calls)


def test_as_many_prompts_as_ranks_are_enough(validated: PPOInputs, tmp_path: Path) -> None:
    fields = {"iterations": 1, "validation": {"every": 1, "num_prompts": 2}, "frozen": FrozenConfig(num_workhorses=2)}
    assert trained(validated, tmp_path / "out", Judge(), **fields)[2]["prompts"] == 2
    with pytest.raises(ValueError, match=r"^ppo.validation: 3 prompts are fewer than the ranks that score them: raise"):
        trained(validated, tmp_path / "more", Judge(), iterations=1, frozen=FrozenConfig(num_workhorses=4))


def test_after_a_crash_the_version_of_before_it_is_found(validated: PPOInputs, tmp_path: Path) -> None:
    _, recorder, before = trained(validated, tmp_path / "first", Judge())
    snapshot = recorder.snapshots[1]
    assert (snapshot.step, snapshot.state["validation"]["best"]) == (2, 1)
    _, _, after = trained(validated, tmp_path / "again", Judge(first=2), newest=snapshot)
    assert after == before
    assert (tmp_path / "again" / "updates").read_text() == "2"
    # On another machine there is nothing but the snapshot.
    _, _, there = trained(validated, tmp_path / "there", Judge(first=2), newest=snapshot, kept=tmp_path / "elsewhere")
    assert there == before
    assert (tmp_path / "there" / "updates").read_text() == "2"


def test_a_validation_without_rows_is_refused(inputs: PPOInputs, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^ppo.validation: the dataset has no validation rows"):
        attempt(inputs, tmp_path / "out", World(), validation={"every": 1})
    with recording():
        data, model = xray.prepare(source="x.jsonl"), xray.base(model="m")
        judged = {"rewards": [Judge.__call__], "validation": {"every": 1}}
        with pytest.raises(ConfigError, match="ppo: validation: is not allowed: the dataset has no validation rows"):
            xray.ppo(model, data, **judged)
        with pytest.raises(ConfigError, match="ppo: judges: are not allowed without validation"):
            xray.ppo(model, data, rewards=[Judge.__call__], judges=[attempt])
