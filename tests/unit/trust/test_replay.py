"""Replay over the fake models of `unit.methods.ppo.loop`: a published stage, computed again, and what differs."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.unit.methods.ppo.loop import make_inputs
from tests.unit.trust import replayed
from tests.unit.trust.commands import xray
from tests.unit.trust.replayed import SURER, Published, SilentModel
from tests.unit.trust.synthetic import Lifecycle, ledger
from xray_runtime.cluster.protocols import ModelHandle
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.kernel.config.section import Section
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Artifact, Dataset
from xray_runtime.kernel.graph.kind import KINDS, NoInputs, StageKind
from xray_runtime.kernel.history.reference import resolve
from xray_runtime.kernel.store.manifest import MANIFEST
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.ppo.ledger_config import LedgerConfig
from xray_runtime.rewards.config import reward_term
from xray_runtime.rewards.journal import ANSWERS
from xray_runtime.rewards.kinds.service import ServiceConfig, ServiceSource
from xray_runtime.rewards.source import Batch, Score, failure
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.replay import Replay, replay
from xray_runtime.trust.replayable import replayable


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> PPOInputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRAY_ALLOWED_IMPORTS", replayed.__name__)


@pytest.fixture
def published(inputs: PPOInputs, tmp_path: Path) -> Published:
    return Published(tmp_path / "run", inputs).make(tmp_path / "made")


@pytest.mark.parametrize("iteration", range(4))
def test_any_iteration_comes_out_the_same(published: Published, tmp_path: Path, iteration: int) -> None:
    world = published.world()
    told: list[tuple[int, int]] = []
    result = published.replay(
        iteration, tmp_path / "again", world, lambda done, total, unit, note: told.append((done, total))
    )
    assert result.is_same
    assert result.compared == list(range(iteration + 1))
    assert result.weights is not None
    assert result.to_json() == {
        "same": True,
        "iteration": iteration,
        "compared": result.compared,
        # The last iteration ends the stage: weights, and what came with the policy.
        "files": 1 + len(list(published.inputs.policy.path.iterdir())) if iteration == 3 else 0,
        "weights": result.weights,
        "taken": [],
        "difference": None,
    }
    assert told == [(done, iteration + 1) for done in range(1, iteration + 2)]
    # Nothing is computed past what is asked for but what shows its weights.
    assert len([call for call in world.calls if call.startswith("generator generate")]) == iteration + 1


def test_a_whole_stage_comes_out_the_same(published: Published, tmp_path: Path) -> None:
    result = published.replay(None, tmp_path / "again")
    assert result.is_same
    assert result.compared == [0, 1, 2, 3]
    assert result.files == 1 + len(list(published.inputs.policy.path.iterdir()))
    assert result.weights is not None
    other = published.replay(None, tmp_path / "other", published.world(surer_by=2 * SURER))
    assert not other.is_same
    assert other.difference is not None
    assert (other.difference.iteration, other.difference.column) == (0, "weights after it")


def test_a_stage_without_a_ledger_is_computed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kind of one's own, without models: all of its files are compared."""
    words = iter(["same", "same", "other"])

    def write(stage: Any, out: Path, recorder: Any) -> int:
        recorder.metrics({"words/words": 1.0}, 0)
        recorder.progress(1, 1, "words", "written")
        (out / "words.txt").write_text(f"{stage.config.lines} {stage.seed} {next(words)}")
        (out / "count.json").write_text("1")
        return 1

    kind = StageKind("words", WordsConfig, NoInputs, Artifact, write)
    life = Lifecycle(tmp_path, tracking=False)
    files = {"words.txt": b"2 7 same", "count.json": b"1"}
    life.add(
        "words", "words", files, {}, {"lines": 2, "runtime": {"device": "cpu", "threads": 2}}, seed=7, type="Model"
    )
    place, node = resolve("words", tmp_path, None)
    with pytest.raises(ConfigError, match="its stage kind 'words' is unknown here; name the module that registers it"):
        replayable(node, place.graph, None)
    monkeypatch.setitem(KINDS, "words", kind)
    with pytest.raises(ConfigError, match="it has no ledger; must be a stage of kind 'ppo'"):
        replayable(node, place.graph, 0)

    def again(name: str) -> Replay:
        (tmp_path / name).mkdir()
        return replay(replayable(node, place.graph, None), None, open_no_models, tmp_path / name)

    found = again("first")
    assert (found.is_same, found.files, found.compared) == (True, 2, [])
    assert again("second").is_same
    found = again("third")
    assert not found.is_same
    recorded, recomputed = (hashlib.sha256(text).hexdigest() for text in (b"2 7 same", b"2 7 other"))
    assert str(found.difference) == f"words.txt: {recorded} in the checkpoint, {recomputed} computed again"


def open_no_models(specs: Mapping[str, Any]) -> contextlib.AbstractContextManager[dict[str, ModelHandle]]:
    raise AssertionError("it has no models")


class WordsConfig(Section):
    lines: int = 1


def test_stages_that_read_outside_files_are_not_replayed(tmp_path: Path) -> None:
    """Its record has a digest in place of the file's name."""
    life = Lifecycle(tmp_path, tracking=False)
    life.add("prepare", "prepare", {}, {}, {"source": "file:" + "ab" * 32})
    place, node = resolve("prepare", tmp_path, None)
    with pytest.raises(ConfigError, match=r"REF: prepare \w+ is not allowed: it reads source from outside the store"):
        replayable(node, place.graph, None)


def test_a_changed_token_is_named_by_replay_and_by_the_audit(published: Published, tmp_path: Path) -> None:
    token = read_shard(shard_path(published.ledger, 1)).table["reply_ids"][2].as_py()[0]
    published.change_a_token(1)
    result = published.replay(2, tmp_path / "again")
    assert not result.is_same
    assert str(result.difference) == (
        f"iteration 1, row 2, reply_ids of token 0: {token + 1} in the ledger, {token} computed again"
    )
    assert result.changed_since
    assert result.to_json()["difference"] == {
        "iteration": 1,
        "row": 2,
        "column": "reply_ids of token 0",
        "recorded": str(token + 1),
        "recomputed": str(token),
        "changed_since": True,
    }
    assert result.compared == [0]
    [found] = [finding for finding in audit(published.store).findings if finding.is_broken]
    # The compressed file may have got another size, of which the finding then speaks.
    assert (found.code, found.detail.partition(" ")[0]) == ("file-changed", "ledger/000001.parquet")
    # What comes after the iteration that is asked for is not looked at.
    assert published.replay(0, tmp_path / "before").is_same


def test_other_weights_are_named_where_they_first_show(published: Published, tmp_path: Path) -> None:
    """Another step than then: rollouts of iteration 0 are the same, its update is not."""
    result = published.replay(2, tmp_path / "again", published.world(surer_by=2 * SURER))
    assert result.compared == [0]
    assert result.difference is not None
    assert (result.difference.iteration, result.difference.column) == (0, "weights after it")
    assert not result.changed_since


def test_other_scores_are_named(published: Published, tmp_path: Path) -> None:
    result = published.replay(3, tmp_path / "again", published.world(generator_off_by=5e-5))
    assert result.difference is not None
    assert "iteration 0, row 0, rollout_logprobs of token 0" in str(result.difference)
    assert result.compared == []


def test_the_last_weights_are_the_checkpoints(published: Published, tmp_path: Path) -> None:
    path = published.ledger.parent / "model.safetensors"
    path.write_text("policy 0.0")
    assert published.replay(3, tmp_path / "again").is_same, "what was published is what the manifest lists"
    manifest = json.loads((published.ledger.parent / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["path"] == "model.safetensors":
            entry["sha256"] = "00" * 32
    (published.ledger.parent / "manifest.json").write_text(json.dumps(manifest))
    result = published.replay(3, tmp_path / "other")
    assert result.compared == [0, 1, 2, 3]
    assert result.difference is not None
    assert (result.difference.iteration, result.difference.column) == (3, "model.safetensors")
    assert not result.is_same


def test_a_file_that_does_not_come_out_is_a_difference(published: Published, tmp_path: Path) -> None:
    path = published.ledger.parent / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"].append({"path": "more.json", "sha256": "00" * 32, "size": 2})
    path.write_text(json.dumps(manifest))
    difference = published.replay(3, tmp_path / "again").difference
    assert difference is not None
    assert (difference.column, difference.recomputed) == ("more.json", "no such file")


def test_other_bytes_of_the_same_rollouts_are_a_difference(published: Published, tmp_path: Path) -> None:
    path = shard_path(published.ledger, 1)
    pq.write_table(pq.read_table(path), path, compression="none")
    result = published.replay(1, tmp_path / "again")
    assert str(result.difference) == (
        "iteration 1, ledger/000001.parquet: the same values in different bytes in the ledger, those of the values "
        "computed again"
    )
    assert result.changed_since


def test_without_digests_the_next_rollouts_speak_for_the_weights(inputs: PPOInputs, tmp_path: Path) -> None:
    published = Published(tmp_path / "run", inputs, SilentModel).make(tmp_path / "made")
    result = published.replay(1, tmp_path / "again")
    assert result.is_same
    assert result.compared == [0, 1, 2]
    assert result.weights is None
    # The first update differs: the log-probabilities after it show that.
    result = published.replay(0, tmp_path / "other", published.world(surer_by=2 * SURER))
    assert not result.is_same
    assert "iteration 1, row 0, " in str(result.difference)


def test_a_damaged_shard_is_a_difference(published: Published, tmp_path: Path) -> None:
    shard_path(published.ledger, 1).write_bytes(b"PAR1")
    result = published.replay(1, tmp_path / "again")
    assert not result.is_same
    assert "000001.parquet" in str(result.difference)


def test_only_the_last_iterations_are_compared(inputs: PPOInputs, tmp_path: Path) -> None:
    published = Published(tmp_path / "run", inputs).make(tmp_path / "made", ledger=LedgerConfig(keep=2))
    result = published.replay(2, tmp_path / "again")
    assert result.is_same
    assert result.compared == [2]
    with pytest.raises(ConfigError, match=r"--iteration: 1 is not allowed: must be one of 2 to 3"):
        published.replay(1, tmp_path / "gone")


def test_stages_that_cannot_be_replayed_are_refused_first(published: Published, tmp_path: Path) -> None:
    place, node = resolve("policy", published.output, None)
    with pytest.raises(ConfigError, match="it has no ledger; must be a stage of kind 'ppo'"):
        replayable(node, place.graph, 0)
    parent = next(iter(published.output.glob("checkpoints/prompts-*"))) / "dataset.json"
    kept = parent.read_text()
    parent.write_text(kept + " ")
    with pytest.raises(ConfigError, match=r"prompts prompts \w+ is not what ppo \w+ was made from: dataset.json has"):
        published.replay(0, tmp_path / "changed")
    parent.write_text(kept)
    assert xray("replay", "ppo", "--output", published.output, "--iteration", 9).exit_code == 2
    assert xray("replay", "sft", "--output", published.output).exit_code == 2
    said = xray("replay", "ppo", "--output", published.output, "--import", "no_such_module")
    assert said.exit_code == 2
    assert "--import: 'no_such_module' cannot be imported (ModuleNotFoundError: " in said.output
    place.graph.nodes.pop(node.sha256)
    _, ppo = resolve("ppo", published.output, None)
    with pytest.raises(ConfigError, match=r"policy \w+ of ppo \w+ is not in the store"):
        replayable(ppo, place.graph, 0)


def test_a_stage_of_another_version_cannot_be_replayed(tmp_path: Path) -> None:
    life = Lifecycle(tmp_path, tracking=False)
    life.add("drawn", "draw", ledger(), {}, type="Model")
    life.add("older", "ppo", ledger(), {}, {"no_such_field": 1, "runtime": {}})
    life.add("oldest", "ppo", ledger(), {}, {"iterations": 2})
    for stage, why in {
        "drawn": r"REF: drawn \w+ is not allowed: its stage kind 'draw' is unknown here",
        "older": r"REF: older \w+: this version of X-ray cannot read its config \(\d+ validation errors? for",
        "oldest": r"REF: oldest \w+: this version of X-ray cannot read its config \('runtime'\)",
    }.items():
        place, node = resolve(stage, tmp_path, None)
        with pytest.raises(ConfigError, match=why):
            replayable(node, place.graph, 0)


SERVICE = ServiceConfig(url="http://127.0.0.1:9/score", retries=0)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many replies each call of a service scored. It never answers twice the same, and fails for some."""
    asked: list[int] = []

    def score(self: ServiceSource, batch: Batch) -> list[Score]:
        asked.append(len(batch.replies))
        return [failure("away") if len(r) % 7 == 0 else Score(0.1 * len(r) * len(asked)) for r in batch.replies]

    monkeypatch.setattr(ServiceSource, "score", score)
    return asked


@pytest.fixture(scope="module")
def validated(inputs: PPOInputs, tmp_path_factory: pytest.TempPathFactory) -> PPOInputs:
    """The same inputs with rows to choose a version by."""
    data = tmp_path_factory.mktemp("data")
    (data / MANIFEST).write_text("{}")
    for path in inputs.prompts.path.iterdir():
        (data / path.name).write_bytes(path.read_bytes())
    rows = [Example(f"v{i}", "v", [{"role": "user", "content": f"validation {i}"}], "x") for i in range(3)]
    write_pairs(data / "validation.arrow", Example, rows)
    return replace(inputs, prompts=Dataset(data))


@pytest.mark.parametrize(
    "fields",
    [
        {"rewards": [reward_term(model="rewards.0"), reward_term(service=SERVICE)]},
        {"rewards": [reward_term(model="rewards.0"), reward_term(service=SERVICE)], "validation": {"every": 1}},
        {"judges": [reward_term(service=SERVICE)], "validation": {"every": 2}},
        {"judges": [reward_term(service=SERVICE)], "validation": {"every": 2}, "ledger": LedgerConfig(keep=1)},
    ],
    ids=["trained on", "and validated by", "a judge of validations", "with the last ledger alone"],
)
def test_replay_reads_answers_of_services_from_the_checkpoint(
    fields: dict[str, Any], validated: PPOInputs, served: list[int], tmp_path: Path
) -> None:
    published = Published(tmp_path / "run", validated).make(tmp_path / "made", **fields, max_failed=0.9)
    before = list(served)
    assert before
    for iteration in (3, None):
        result = published.replay(iteration, tmp_path / f"again-{iteration}")
        assert result.is_same, result.difference
        assert result.taken == ["service"]
        assert served == before
    # Another answer would have made other bytes.
    path = next(published.output.glob(f"checkpoints/ppo-*/{ANSWERS}"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {"score": line["score"] and -line["score"]}) + "\n" for line in lines))
    assert not published.replay(None, tmp_path / "other").is_same
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"^REF: .*answers.jsonl, line 1: damaged$"):
        published.replay(None, tmp_path / "damaged")


@pytest.mark.parametrize("field", ["rewards", "judges"])
@pytest.mark.parametrize("ledger", [{"tokens": "hashed"}, {"keep": "none"}])
def test_answers_of_services_are_not_kept_without_a_ledger(
    ledger: dict[str, Any], field: str, validated: PPOInputs, served: list[int], tmp_path: Path
) -> None:
    fields: dict[str, Any] = {field: [reward_term(service=SERVICE)], "validation": {"every": 2}, "max_failed": 0.9}
    published = Published(tmp_path / "run", validated).make(tmp_path / "made", **fields, ledger=LedgerConfig(**ledger))
    assert not list(published.output.glob(f"checkpoints/ppo-*/{ANSWERS}"))
    with pytest.raises(ConfigError, match="service might answer differently, and the checkpoint does not hold its"):
        published.replay(None, tmp_path / "again")


def test_rollouts_are_shown_and_filtered(published: Published) -> None:
    said = xray("rollouts", "ppo", "--output", published.output)
    assert said.exit_code == 0
    assert "question" in said.output
    assert "16 of 16 rows" in said.output
    where = ("ppo", "--output", published.output, "--json")
    found = json.loads(xray("rollouts", *where, "--iteration", 2, "--limit", 3).output)
    assert found["total"] == 4
    assert [row["iteration"] for row in found["rows"]] == [2, 2, 2]
    assert set(found["rows"][0]["scores"]) == {"rewards.0", f"{replayed.__name__}:judge"}
    best = json.loads(xray("rollouts", *where, "--source", "rewards.0", "--min-reward", 4).output)
    assert {row["scores"]["rewards.0"] for row in best["rows"]} <= {4.0}
    everything = json.loads(xray("rollouts", *where, "--limit", 0).output)["rows"]
    assert best["total"] == sum(row["scores"]["rewards.0"] == 4.0 for row in everything)
    assert json.loads(xray("rollouts", *where, "--unused").output)["total"] == 0


def test_bad_input_to_rollouts_and_a_changed_shard(published: Published) -> None:
    where = ("rollouts", "ppo", "--output", published.output)
    for wrong, line in (
        (("--iteration", 4), "--iteration: 4 is not allowed: must be one of 0 to 3"),
        (("--source", "taste"), "--source: 'taste' is not allowed: must be one of 'rewards.0',"),
    ):
        said = xray(*where, *wrong)
        assert said.exit_code == 2
        assert line in said.output
    published.change_a_token(1)
    said = xray(*where, "--iteration", 1)
    assert said.exit_code == 1
    assert "ledger/000001.parquet was changed after it was published" in said.output
    assert xray(*where, "--iteration", 2).exit_code == 0
