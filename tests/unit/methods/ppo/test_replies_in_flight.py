"""Single replies, and episodes of an environment, that run across updates: PPO's loop over models in this process."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.methods.ppo import sample_environments
from tests.unit.methods.ppo.loop import MINIBATCH, REPLIES, PPOModel, World, attempt, logprob
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.data.ragged import Ragged
from xray_runtime.kernel.graph.artifacts import Dataset
from xray_runtime.methods.common.sampling.reply_stream import by_token
from xray_runtime.methods.ppo.config import KLConfig, PPOConfig
from xray_runtime.methods.ppo.in_flight import InFlight
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.rewards.config import reward_term
from xray_runtime.rewards.journal import ANSWERS, Journal
from xray_runtime.trust.replay_answers import restore_recorded

ITERATIONS, SURER = 8, 0.05
Rows_ = list[dict[str, Any]]


class Policy(PPOModel):
    """Samples tokens that request and version decide, of lengths that differ by more than 20 times, slowly."""

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        assert version == self.version
        if self.world.error is not None and version >= 2:  # type: ignore[attr-defined]
            raise self.world.error  # type: ignore[attr-defined]
        time.sleep(self.world.pause_s)  # type: ignore[attr-defined]
        replies = []
        for prompt, seed in zip(rows.input_ids, rows.seed.tolist(), strict=True):
            draw, ids = random.Random(repr((prompt.tolist(), seed, version))), list[int]()
            while len(ids) < sampling.max_new_tokens and (not ids or ids[-1] != sampling.stop_token_ids[0]):
                ids.append(sampling.stop_token_ids[0] if draw.random() < 0.04 else draw.randint(20, 60))
            replies.append(ids)
        ids_column = Ragged.of(replies)
        return ReplyBatch(
            response_ids=ids_column,
            rollout_logprobs=ids_column.like(logprob(ids_column.values) + np.float32(self.surer)),
            ended=np.array([ids[-1] == sampling.stop_token_ids[0] for ids in replies]),
        )


def options(**fields: Any) -> dict[str, Any]:
    return {
        "iterations": ITERATIONS,
        "lag": 3,
        "in_flight_updates": True,
        "max_new_tokens": 64,
        "advantages": "reinforce++",
        "whiten_advantages": False,
        "kl": KLConfig(controller="fixed", coef=0.0),
        "importance_cap": 1.3,
        "prompts_per_iteration": REPLIES,
        "minibatch_size": MINIBATCH,
        "rewards": [reward_term(model="rewards.0")],
    } | fields


PLAYED: dict[str, Any] = {
    "environment": {
        "path": f"{sample_environments.__name__}:ThreeTurns", "max_turns": 3, "max_tokens": 400, "num_workers": 1,
    },
    "rewards": [],
    "gae_lambda": 1.0,
}  # fmt: skip


def trained(inputs: PPOInputs, out: Path, kept: Path, **fields: Any) -> FakeRecorder:
    world = World(surer_by=SURER)
    world.error = fields.pop("error", None)  # type: ignore[attr-defined]
    world.pause_s = fields.pop("pause_s", 0.08)  # type: ignore[attr-defined]
    world.tokenizer = load_tokenizer(inputs.policy.path)  # type: ignore[attr-defined]
    kept.mkdir(exist_ok=True)
    newest = fields.pop("newest", None)
    return attempt(inputs, out, world, model=Policy, kept=kept, newest=newest, **options(**fields))


def shards(out: Path) -> list[Rows_]:
    return [read_shard(path).table.to_pylist() for path in sorted((out / "ledger").iterdir())]


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "ledger").iterdir()}


def test_each_group_is_trained_on_once_by_tokens_of_known_versions(inputs: PPOInputs, tmp_path: Path) -> None:
    recorder = trained(inputs, tmp_path / "out", tmp_path / "kept")
    found = shards(tmp_path / "out")
    groups = [[row["group"] for row in rows] for rows in found]
    assert sorted(group for of_iteration in groups for group in of_iteration) == list(range(ITERATIONS * REPLIES))
    assert all(of_iteration == sorted(of_iteration) for of_iteration in groups)
    lengths = [len(row["reply_ids"]) for rows in found for row in rows]
    assert max(lengths) >= 20 * min(lengths)
    mixed = 0
    for iteration, rows in enumerate(found):
        for row in rows:
            versions = row["token_versions"]
            mixed += len(set(versions)) > 1
            assert versions == sorted(versions)
            assert row["version"] == versions[0]
            assert iteration - 3 <= versions[0] <= versions[-1] <= iteration
            # Each minibatch adds SURER to the policy's log-probabilities; a version is REPLIES / MINIBATCH of them.
            added = np.array(versions) * SURER * REPLIES / MINIBATCH
            assert row["rollout_logprobs"] == pytest.approx((logprob(np.array(row["reply_ids"])) + added).tolist())
            ratios = np.exp(SURER * REPLIES / MINIBATCH * (iteration - np.array(versions)))
            assert row["weights"] == pytest.approx(np.minimum(ratios, 1.3).tolist(), rel=1e-5)
    assert mixed
    assert all(point["rollout/max_lag"] <= 3 for point in recorder.points)
    assert all(0 <= point["speed/generator_idle"] <= 1 for point in recorder.points)


def _killed(kept: Path, iteration: int) -> list[dict[str, Any]]:
    """Cut the journal a few lines after it recorded an iteration; returns what is left of it."""
    lines = (kept / ANSWERS).read_bytes().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines]
    [end] = [n for n, entry in enumerate(entries) if "groups" in entry and entry["step"] == iteration]
    (kept / ANSWERS).write_bytes(b"".join(lines[: end + 4]))
    # A write that was cut short is not read at all.
    whole = next(n for n in range(end + 4, 0, -1) if "seal" in entries[n - 1])
    return entries[:whole]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"oversample": 0.5}, id="oversample", marks=pytest.mark.long),
        pytest.param(
            {"samples_per_prompt": 2, "prompts_per_iteration": 2, "advantages": "rloo"},
            id="groups",
            marks=pytest.mark.long,
        ),
        pytest.param({}, id="replies"),
        pytest.param(PLAYED, id="environment"),
    ],
)
def test_a_killed_run_keeps_what_had_ended_and_a_replay_follows_the_ledger(
    inputs: PPOInputs, tmp_path: Path, fields: dict[str, Any]
) -> None:
    kept = tmp_path / "kept"
    recorder = trained(inputs, tmp_path / "whole", kept, **fields)
    before = files(tmp_path / "whole")
    left = _killed(kept, 2)
    out = tmp_path / "resumed"
    trained(inputs, out, kept, newest=deepcopy(recorder.snapshots[0]), **fields)
    after = files(out)
    numbers = [shard_path(Path(), number).name for number in range(ITERATIONS)]
    assert [after[name] for name in numbers[:3]] == [before[name] for name in numbers[:3]]
    size = fields.get("samples_per_prompt", 1)
    rows = {(row["group"], row["row"] % size): row for of_iteration in shards(out) for row in of_iteration}
    newest: dict[tuple[int, int], dict[str, Any]] = {}
    for entry in left:
        if entry["source"] == "turns":
            newest[entry["group"], entry["row"]] = entry
    # What ended is trained on as it was; unless it is given up, or became too old.
    same = [
        [token for turn in entry["turns"] for token in by_token(turn[3])]
        == [v for v, own in zip(rows[place]["token_versions"], rows[place].get("response_mask") or [1] * 99) if own]  # noqa: B905
        for place, entry in newest.items()
        if place in rows
    ]
    assert sum(same) >= len(same) - 2
    assert len(same) >= 3 * 4

    for path in inputs.policy.path.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    replayed = tmp_path / "replayed-kept"
    replayed.mkdir()
    restore_recorded(out, PPOConfig(**options(**fields)), ITERATIONS - 1, Journal(replayed))
    trained(inputs, tmp_path / "replayed", replayed, **fields)
    assert files(tmp_path / "replayed") == after

    # A replay to iteration 2 also compares the next, where no digest tells the weights after it.
    begun = tmp_path / "begun-kept"
    begun.mkdir()
    restore_recorded(out, PPOConfig(**options(**fields)), 2, Journal(begun))
    trained(inputs, tmp_path / "begun", begun, **fields)
    found = files(tmp_path / "begun")
    assert [found[name] for name in numbers[:4]] == [after[name] for name in numbers[:4]]


def test_the_slowest_are_given_up_where_that_is_asked_for(inputs: PPOInputs, tmp_path: Path) -> None:
    recorder = trained(inputs, tmp_path / "out", tmp_path / "kept", oversample=0.5)
    dropped = [read_shard(path).dropped for path in sorted((tmp_path / "out" / "ledger").iterdir())]
    trained_on = [row["group"] for rows in shards(tmp_path / "out") for row in rows]
    given_up = [group for of_iteration in dropped for group in of_iteration]
    assert given_up
    assert max(Counter(trained_on + given_up).values()) == 1
    assert [len(of_iteration) for of_iteration in dropped] == [p["rollout/dropped_groups"] for p in recorder.points]
    assert all(len(of_iteration) <= 2 for of_iteration in dropped[:-1])


def test_a_reply_over_the_bound_begins_anew(inputs: PPOInputs, tmp_path: Path) -> None:
    recorder = trained(inputs, tmp_path / "out", tmp_path / "kept", lag=1, max_new_tokens=256, pause_s=0.4)
    for iteration, rows in enumerate(shards(tmp_path / "out")):
        assert all(iteration - 1 <= v <= iteration for row in rows for v in row["token_versions"])
    assert sum(point["rollout/stale"] for point in recorder.points) > 0


def test_episodes_of_an_environment_have_turns_of_several_versions(inputs: PPOInputs, tmp_path: Path) -> None:
    trained(inputs, tmp_path / "out", tmp_path / "kept", **PLAYED)
    found = shards(tmp_path / "out")
    assert sorted(row["group"] for rows in found for row in rows) == list(range(ITERATIONS * REPLIES))
    assert any(len(set(row["token_versions"])) > 1 for rows in found for row in rows)
    for iteration, rows in enumerate(found):
        for row in rows:
            own = np.array(row["response_mask"])
            versions = np.array(row["token_versions"])[own]
            added = versions * SURER * REPLIES / MINIBATCH
            said = logprob(np.array(row["reply_ids"])[own]) + added
            assert np.array(row["rollout_logprobs"])[own].tolist() == pytest.approx(said.tolist())
            assert iteration - 3 <= versions.min()


def with_validation(inputs: PPOInputs, data: Path) -> PPOInputs:
    """Two validation prompts beside the others."""
    shutil.copytree(inputs.prompts.path, data)
    rows = [Example(f"v{n}", "v", [{"role": "user", "content": f"validation {n}"}], "x") for n in range(2)]
    write_pairs(data / "validation.arrow", Example, rows)
    return replace(inputs, prompts=Dataset(data))


@pytest.mark.parametrize("fields", [{}, pytest.param(PLAYED, marks=pytest.mark.long)], ids=["replies", "environment"])
def test_a_validation_says_which_version_it_scored(inputs: PPOInputs, tmp_path: Path, fields: dict[str, Any]) -> None:
    """It is of one version, while the replies beside it go on with several."""
    given = fields | {"validation": {"every": 2, "num_prompts": 2}, "ends_with_last": False}
    recorder = trained(with_validation(inputs, tmp_path / "data"), tmp_path / "out", tmp_path / "kept", **given)
    assert [point.get("validation/version") for point in recorder.points] == [0, None, 2, None, 4, None, 6, None]
    mixed = [row for rows in shards(tmp_path / "out") for row in rows if len(set(row["token_versions"])) > 1]
    assert mixed
    record = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert list(record["scores"]) == ["0", "2", "4", "6", "8"]


def test_the_last_weights_come_as_all_others(
    inputs: PPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation follows them; what was given up may still wait for the generator then, as another version."""
    versions, updating = list[int](), InFlight.updating

    def noted(self: InFlight[Any, Any], version: int) -> AbstractContextManager[None]:
        versions.append(version)
        return updating(self, version)

    monkeypatch.setattr(InFlight, "updating", noted)
    fields: dict[str, Any] = {"iterations": 2, "oversample": 0.5, "max_new_tokens": 16, "ends_with_last": False}
    fields |= {"validation": {"every": 2, "num_prompts": 2}}
    trained(with_validation(inputs, tmp_path / "data"), tmp_path / "out", tmp_path / "kept", **fields)
    assert versions == [0, 1, 2]


def test_a_dead_generator_is_an_error_in_seconds(inputs: PPOInputs, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="the device is gone"):
        trained(inputs, tmp_path / "out", tmp_path / "kept", error=ValueError("the device is gone"))
    assert time.monotonic() - start < 20
