"""Episodes that run across updates: real agents and a real gateway, models in this process."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.message_texts import Messages
from tests.unit.agents import sample_agents
from tests.unit.agents.parts import FakeGenerator
from tests.unit.methods.ppo.loop import MINIBATCH, REPLIES, PPOModel, World, attempt, logprob
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.protocols import ModelHandle
from xray_runtime.data.batch import PromptBatch, ReplyBatch
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.methods.ppo.config import KLConfig, PPOConfig
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.ppo.rollouts import PROBE_TOKENS
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.rewards.journal import ANSWERS, Journal
from xray_runtime.trust.replay_answers import restore_recorded

ITERATIONS, SURER = 5, 0.05
ATTEMPTS = 4
Rows_ = list[dict[str, Any]]


class Policy(PPOModel):
    """Says a few letters, which seed and version decide, with the log-probabilities of its version."""

    def _follow(self, policy: ModelHandle, version: int) -> str:
        found = super()._follow(policy, version)
        (self.world.versions / str(version)).touch()  # type: ignore[attr-defined]
        return found

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        assert version == self.version
        self.world.seeds += rows.seed.tolist()
        seeds = rows.seed + version
        found = FakeGenerator(self.world.tokenizer)(rows.with_columns(seed=seeds), sampling, version)  # type: ignore[attr-defined]
        ids = found.response_ids
        return found.with_columns(rollout_logprobs=ids.like(logprob(ids.values) + self.surer))


class Probed(Policy):
    """Samples the probes of generator and trainer alone."""

    def _generate(self, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        assert sampling.max_new_tokens == PROBE_TOKENS
        return super()._generate(rows, sampling, version)


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory with a file for each version that the generator has held."""
    directory = tmp_path / "versions"
    directory.mkdir()
    monkeypatch.setenv("XRAY_TEST_VERSIONS", str(directory))
    return directory


def options(agent: str = "waits", **fields: Any) -> dict[str, Any]:
    return {
        "environment": {"agent": f"{sample_agents.__name__}:{agent}", "max_tokens": 256, "timeout_s": 60.0},
        "rewards": [],
        "iterations": ITERATIONS,
        "lag": 4,
        "in_flight_updates": True,
        "max_new_tokens": 16,
        "advantages": "reinforce++",
        "whiten_advantages": False,
        "kl": KLConfig(controller="fixed", coef=0.0),
        "importance_cap": 1.3,
    } | fields


def trained(inputs: PPOInputs, out: Path, versions: Path, kept: Path, **fields: Any) -> FakeRecorder:
    world = World(surer_by=SURER)
    world.tokenizer = load_tokenizer(inputs.policy.path)  # type: ignore[attr-defined]
    world.versions = versions  # type: ignore[attr-defined]
    kept.mkdir(exist_ok=True)
    newest, model = fields.pop("newest", None), fields.pop("model", Policy)
    return attempt(inputs, out, world, model=model, kept=kept, newest=newest, **options(**fields))


def shards(out: Path) -> list[Rows_]:
    """The ledger's rows, by iteration."""
    numbers = range(len(list((out / "ledger").iterdir())))
    return [read_shard(shard_path(out / "ledger", number)).table.to_pylist() for number in numbers]


def records(rows: Rows_) -> list[dict[str, Any]]:
    return [json.loads(row["answers"]) for row in rows]


def tokens_of(row: dict[str, Any]) -> Iterator[tuple[int, float]]:
    """(version, importance weight) of each sampled token; an episode of `waits` is one branch of two calls."""
    calls = json.loads(row["answers"])["calls"]
    in_order = sorted(calls, key=lambda c: c["parent"] is not None)
    versions = [version for call in in_order for version, count in call["versions"] for _ in range(count)]
    assert versions == [each for each, own in zip(row["token_versions"], row["response_mask"], strict=True) if own]
    weights = [weight for weight, own in zip(row["weights"], row["response_mask"], strict=True) if own]
    return zip(versions, weights, strict=True)


def test_a_slow_agent_delays_no_other_and_tokens_are_weighted_by_version(
    inputs: PPOInputs, tmp_path: Path, versions: Path
) -> None:
    """The wait ends with version 2, which comes after two iterations: those have other prompts than the slow one's."""
    trained(inputs, tmp_path / "out", versions, tmp_path / "kept")
    found = shards(tmp_path / "out")
    groups = [[row["group"] for row in rows] for rows in found]
    # Each group once, and of those that were complete the ones that began first.
    assert sorted(group for of_iteration in groups for group in of_iteration) == list(range(ITERATIONS * REPLIES))
    assert all(of_iteration == sorted(of_iteration) for of_iteration in groups)
    slow = [
        (iteration, row, record)
        for iteration, rows in enumerate(found)
        for row, record in zip(rows, records(rows), strict=True)
        if record["calls"] and any("number 3" in str(call["messages"]) for call in record["calls"])
    ]
    assert len(slow) == 2
    iteration, row, record = slow[0]
    assert iteration >= 2
    spread = sorted(version for call in record["calls"] for version, _ in call["versions"])
    assert spread[0] < 2 <= spread[1]
    assert row["version"] == spread[0]
    # Each minibatch adds SURER to the policy's log-probabilities, and a version is REPLIES / MINIBATCH minibatches.
    for iteration, rows in enumerate(found):
        for row in rows:
            for version, weight in tokens_of(row):
                assert iteration - 4 <= version <= iteration
                ratio = math.exp(SURER * REPLIES / MINIBATCH * (iteration - version))
                assert weight == pytest.approx(min(ratio, 1.3), rel=1e-5)


def test_a_run_that_was_killed_follows_its_journal_and_a_replay_the_ledger(
    inputs: PPOInputs, tmp_path: Path, versions: Path
) -> None:
    kept = tmp_path / "kept"
    recorder = trained(inputs, tmp_path / "whole", versions, kept)
    lines = (kept / ANSWERS).read_bytes().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines]
    # Killed in the third iteration; the newest snapshot is after the first.
    [end] = [n for n, entry in enumerate(entries) if "groups" in entry and entry["step"] == 2]
    (kept / ANSWERS).write_bytes(b"".join(lines[: end + 4]))
    out = tmp_path / "resumed"
    trained(inputs, out, versions, kept, newest=deepcopy(recorder.snapshots[0]))
    before, after = shards(tmp_path / "whole"), shards(out)
    assert after[:3] == before[:3]
    # A call that was journaled is in the run that goes on as it was, whichever iteration it is in.
    journaled = {e["call"]["key"]: e["call"] for e in entries[: end + 4] if "call" in e}
    again = {call["key"]: call for rows in after for record in records(rows) for call in record["calls"]}
    assert journaled.keys() <= again.keys()
    assert all(again[key][name] == call[name] for key, call in journaled.items() for name in ("ids", "versions"))
    assert len(again) == ITERATIONS * REPLIES * 2

    for path in inputs.policy.path.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    replayed = tmp_path / "replayed-kept"
    replayed.mkdir()
    config = PPOConfig(**options() | {"prompts_per_iteration": REPLIES, "minibatch_size": MINIBATCH})
    restored = restore_recorded(out, config, ITERATIONS - 1, Journal(replayed))
    assert restored == ["environment"]
    trained(inputs, tmp_path / "replayed", versions, replayed, model=Probed, agent="is_gone")
    for iteration in range(ITERATIONS):
        shard = shard_path(Path("ledger"), iteration)
        assert (tmp_path / "replayed" / shard).read_bytes() == (out / shard).read_bytes()


def test_an_episode_over_the_bound_begins_anew(inputs: PPOInputs, tmp_path: Path, versions: Path) -> None:
    """One waits for version 2, at which its first call is two updates old."""
    recorder = trained(inputs, tmp_path / "out", versions, tmp_path / "kept", agent="first_pauses", lag=1)
    found = shards(tmp_path / "out")
    assert all(
        iteration - 1 <= v <= iteration
        for iteration, rows in enumerate(found)
        for row in rows
        for v, _ in tokens_of(row)
    )
    counts = [record["counts"]["stale"] for rows in found for record in records(rows)]
    assert sum(counts) == max(counts) == 1
    assert sum(point["rollout/agent/stale"] for point in recorder.points) == 1
    assert all(point["rollout/lag"] <= 1 for point in recorder.points)


def test_an_episode_that_ended_begins_anew_when_its_group_is_complete_too_late(
    inputs: PPOInputs, tmp_path: Path, versions: Path
) -> None:
    """Its group's other episode waits for version 2."""
    fields = {"samples_per_prompt": 2, "prompts_per_iteration": 2, "advantages": "rloo", "lag": 1}
    # On a busy machine the process of the group's other episode may start as late: it then has nothing to repeat.
    for number in range(ATTEMPTS):
        shutil.rmtree(versions)
        versions.mkdir()
        out = tmp_path / f"out-{number}"
        trained(inputs, out, versions, tmp_path / f"kept-{number}", agent="first_waits", **fields)
        late = [
            (iteration, record)
            for iteration, rows in enumerate(shards(out))
            for record in records(rows)
            if record["counts"]["stale"]
        ]
        if late:
            break
    [(iteration, record)] = late
    assert record["counts"]["stale"] == 1
    assert iteration >= 2
    assert all(iteration - 1 <= v for call in record["calls"] for v, _ in call["versions"])


@pytest.mark.parametrize("fields", [{"lag": 0}, {"in_flight_updates": False, "oversample": 0.25}])
def test_options_that_exclude_in_flight_updates_are_refused(fields: dict[str, Any], message_texts: Messages) -> None:
    with message_texts.raises(ConfigError):
        validate_as(PPOConfig, options(**fields), "ppo")
