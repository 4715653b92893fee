"""The whole lifecycle through the real command: Prefect, Ray, DeepSpeed, vLLM and MLflow on a tiny model."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.chaos.harness import Case, nothing_is_lost, outcome
from tests.e2e.conftest import Outcome, edges, run_tiny, to_compute, xray
from tests.e2e.exposure import Exposure
from tests.e2e.serving import Load, changed, serving, wait_for
from tests.unit.trust.commands import xray as in_process
from xray_runtime.data.ledger import LedgerShard, read_shard, shard_path
from xray_runtime.kernel.evidence.statement import read_statement
from xray_runtime.kernel.history.reference import resolve
from xray_runtime.kernel.store.checkpoints import verify
from xray_runtime.methods.evaluate.config import PromotionConfig
from xray_runtime.trust.promotion import promote, review, roll_back

FAULTS = {
    "killed": [Case(0, "supervisor", "kill", "sft", 1.0, damages="base"), Case(2, "raylet", "kill", "ppo-1", 1.0)],
    "interrupted": [
        Case(1, "learner", "kill", "reward", 1.0),
        Case(3, "supervisor", "interrupt", "ppo-2", 1.0),
    ],
}
"""A killed command that finds a damaged checkpoint, and a lost Ray; a lost Workhorse and an interrupted command.
`test_chaos` draws others."""
COMPARED = (
    *("weights before", "replies", "log-probabilities", "rewards", "advantages", "loss", "gradient", "weights after"),
    "weights that were sent next",
)
"""Parts of an iteration that is neither the first nor the last."""
NAMES = ["prepare", "base", "sft", "preferences", "reward", "ppo-1", "ppo-2", "evaluate"]


def shas(content: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["checkpoint"]["sha256"] for stage in content["stages"]}


def cached(content: dict[str, Any]) -> list[str]:
    return [stage["name"] for stage in content["stages"] if stage["cached"]]


def test_the_record_is_whole(first: Outcome, output: Path) -> None:
    content = first.lifecycle
    assert content == json.loads((output / "lifecycle.json").read_text())
    assert content["status"] == "completed"
    assert [stage["name"] for stage in content["stages"]] == NAMES
    assert cached(content) == []
    known = set(shas(content).values())
    for stage in content["stages"]:
        assert verify(Path(stage["checkpoint"]["uri"]), stage["checkpoint"]["sha256"]) == []
        assert set(stage["parents"]) <= known
        assert stage["attempts"] == 1
    ppo = content["stages"][6]
    assert {shas(content)[name] for name in ("ppo-1", "sft", "reward", "prepare")} == set(ppo["parents"])
    assert content["registered"] == {"name": "xray-tiny-policy", "version": "1", "alias": "candidate"}
    evaluation = content["evaluation"]
    assert evaluation["samples"] == 16
    assert 0 <= evaluation["win_rate"] <= 1
    assert evaluation["win_rate_ci95"][0] <= evaluation["win_rate"] <= evaluation["win_rate_ci95"][1]


def test_only_ray_is_reached_by_others(watched: tuple[Outcome, Exposure]) -> None:
    """It asks for its token. All else listens on loopback, and there the run's own Prefect asks for its password."""
    _, exposure = watched
    assert exposure.num_processes > 5
    # A driver of Ray's listens as Ray does.
    rays = [found for found in exposure.listening_to_others if "xray.cli.runner" not in found[0]]
    assert rays
    assert [line for line, mode in rays if mode != "token" or not (line.startswith("ray::") or "/ray/" in line)] == []
    assert exposure.prefect_status == 401


def test_prefect_shows_what_waits_for_what(first: Outcome, output: Path) -> None:
    content, drawn = first.lifecycle, edges(output)
    names = {sha: name for name, sha in shas(content).items()}
    for stage in content["stages"]:
        expected = {names[sha] for sha in stage["parents"]}
        assert {parent for parent, child in drawn if child == stage["name"]} == expected


def test_the_policy_loads_without_xray_and_differs_from_its_parent(first: Outcome) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    places = {stage["name"]: stage["checkpoint"]["uri"] for stage in first.lifecycle["stages"]}
    policy, sft = (AutoModelForCausalLM.from_pretrained(places[name]) for name in ("ppo-2", "sft"))
    moved = [not torch.equal(p, q) for p, q in zip(policy.parameters(), sft.parameters(), strict=True)]
    assert all(moved)
    prompt = AutoTokenizer.from_pretrained(places["ppo-2"]).apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert policy.generate(**prompt, max_new_tokens=3).shape[1] > prompt["input_ids"].shape[1]


def test_mlflow_shows_what_came_from_what(first: Outcome, output: Path) -> None:
    import mlflow

    content = first.lifecycle
    uri = f"sqlite:///{output / 'mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    version = client.get_model_version_by_alias("xray-tiny-policy", "candidate")
    model = client.get_logged_model(version.source.removeprefix("models:/"))
    sha = shas(content)
    assert model.params["sha256"] == sha["ppo-2"]
    # From the registered version to every ancestor, through runs alone.
    found: dict[str, str] = {}
    pending = [model.model_id]
    while pending:
        ancestor = client.get_logged_model(pending.pop())
        stage = next(name for name, value in sha.items() if value == ancestor.params["sha256"])
        if stage not in found:
            found[stage] = ancestor.model_id
            run = client.get_run(ancestor.source_run_id)
            pending += [i.model_id for i in run.inputs.model_inputs]
    assert set(found) == set(NAMES) - {"evaluate"}
    run = client.get_run(client.get_logged_model(found["ppo-2"]).source_run_id)
    assert run.data.tags["mlflow.parentRunId"] == content["run_id"]
    tags = {tag.key: tag.value for tag in run.inputs.dataset_inputs[0].tags}
    assert tags["xray.sha256"] == sha["prepare"]
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [m.step for m in history] == [0, 1, 2, 3]
    artifacts = {a.path for a in client.list_artifacts(content["run_id"])}
    assert {"config.yaml", "lifecycle.json", "report.html"} <= artifacts


def test_vllm_compared_what_it_read_with_what_was_trained(first: Outcome) -> None:
    """Each trained policy's files, before the first stage that samples from it, as its signed statement says."""
    found = {stage["name"]: Path(stage["checkpoint"]["uri"]) for stage in first.lifecycle["stages"]}
    readings = {name: read_statement(path).predicate.details.run.readings for name, path in found.items()}
    policies = [found[name].name for name in ("sft", "ppo-1", "ppo-2")]
    expected = {name: set[str]() for name in NAMES} | {
        "preferences": {policies[0]},
        "ppo-1": {policies[0], "ppo-1"},
        "ppo-2": {policies[1], "ppo-2"},
        "evaluate": {policies[0], policies[2]},
    }
    assert {name: set(each) for name, each in readings.items()} == expected
    assert all(0 <= nats < 1e-5 for each in readings.values() for nats in each.values())


def test_the_report_is_one_file(first: Outcome, output: Path) -> None:
    html = (output / "report.html").read_text()
    assert all(name in html for name in NAMES)
    assert html.count("<svg") >= 5
    assert 'src="http' not in html
    assert "<link" not in html


def test_an_iteration_is_replayed_to_the_same_bytes(first: Outcome, output: Path) -> None:
    """…on the real engines. Once a token of its shard is changed the audit says so; what replay says of that is shown
    in unit tests."""
    again = xray("replay", "ppo-2", "--output", str(output), "--iteration", "2", "--json")
    assert again.code == 0, again.err
    said = json.loads(again.out)
    assert (said["same"], said["compared"], said["changes"]) == (True, [0, 1, 2], [])
    rows = json.loads(in_process("rollouts", "ppo-2", "--output", output, "--json", "--limit", 0).stdout)["rows"]
    assert len(rows) == 4 * 8
    assert {row["used"] for row in rows} == {"yes"}
    ledger = Path(first.lifecycle["stages"][6]["checkpoint"]["uri"]) / "ledger"
    path = shard_path(ledger, 1)
    content, shard = path.read_bytes(), read_shard(path)
    replies = shard.table["reply_ids"].to_pylist()
    replies[5][0] += 1
    column = shard.table.schema.get_field_index("reply_ids")
    field = shard.table.schema.field("reply_ids")
    changed = shard.table.set_column(column, field, pa.array(replies, field.type))
    LedgerShard(shard.iteration, shard.policy, changed).write(ledger)
    try:
        broken = in_process("audit", "ppo-2", "--output", output)
        assert broken.exit_code == 1
        assert "BROKEN file-changed: ppo-2" in broken.output
        assert "ledger/000001.parquet" in broken.output
    finally:
        path.write_bytes(content)


@pytest.mark.long  # the parts of a bundle are shown in unit tests, and a replay on the real engines above
def test_an_iteration_is_replayed_from_its_bundle(first: Outcome, output: Path, tmp_path: Path) -> None:
    """…on the real engines, once the output directory that it came from is gone."""
    copy, bundle = tmp_path / "copy", tmp_path / "one.tar"
    shutil.copytree(output.with_name("undisturbed"), copy, symlinks=True)
    made = xray("bundle", "ppo-1", str(bundle), "--output", str(copy), "--iteration", "1", "--sample", "3")
    assert made.code == 0, made.err
    key = tmp_path / "signing.pub"
    shutil.copy(copy / "keys" / "signing.pub", key)
    shutil.rmtree(copy)
    again = xray("replay", str(bundle), "--public-key", str(key), "--json")
    assert again.code == 0, again.err
    said = json.loads(again.out)
    assert (said["same"], said["iteration"], said["changes"]) == (True, 1, [])
    assert {part["name"]: part["verdict"] for part in said["parts"]} == dict.fromkeys(COMPARED, "equal")
    with tarfile.open(bundle) as archive:
        page = archive.extractfile("sample-3.html").read().decode()  # type: ignore[union-attr]
    # Two epochs.
    assert page.count("token by token: what each adds to the loss") == 2
    assert "nan" not in page


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("faults", ["killed", pytest.param("interrupted", marks=pytest.mark.long)])
def test_faults_lose_nothing_and_leave_nothing_running(
    first: Outcome, output: Path, tmp_path: Path, faults: str
) -> None:
    nothing_is_lost(outcome(output.with_name("undisturbed")), tmp_path, FAULTS[faults])
    # A damaged checkpoint is noticed, moved aside, and computed again to the same bytes.
    damaged = [case.damages for case in FAULTS[faults] if case.damages]
    kept = [path.name.partition("-")[0] for path in tmp_path.glob("faults/checkpoints/*.damaged-1")]
    assert kept == damaged


def test_only_what_depends_on_a_change_would_be_computed(first: Outcome, output: Path) -> None:
    explain = ("run", "configs/tiny.yaml", "--output", str(output), "--json", "--explain")
    assert to_compute(xray(*explain)) == []
    assert to_compute(xray(*explain, "--set", "ppo.stages.1.lr=1e-4")) == ["ppo-2", "evaluate"]


def test_again_computes_nothing(first: Outcome, output: Path) -> None:
    """…and records nothing, as long as the log ends with that run."""
    again = output.with_name("again")
    shutil.copytree(output.with_name("undisturbed"), again, symlinks=True)
    log = (again / "log.jsonl").read_bytes()
    same = run_tiny(again)
    assert same.code == 0, same.err
    assert cached(same.lifecycle) == NAMES
    assert shas(same.lifecycle) == shas(first.lifecycle)
    assert same.lifecycle["registered"] == first.lifecycle["registered"]
    assert same.lifecycle["run_id"] == first.lifecycle["run_id"]
    assert (again / "log.jsonl").read_bytes() == log
    # A lost report is made again, by a run with a record.
    (again / "report.html").unlink()
    recorded = run_tiny(again)
    assert recorded.code == 0, recorded.err
    assert cached(recorded.lifecycle) == NAMES
    assert recorded.lifecycle["run_id"] != first.lifecycle["run_id"]
    assert (again / "report.html").is_file()
    assert (again / "log.jsonl").read_bytes().startswith(log)


@pytest.mark.long
def test_a_change_computes_only_what_depends_on_it(first: Outcome, second: Outcome, output: Path) -> None:
    """…and a damaged checkpoint is noticed and computed again, to the same bytes."""
    content = second.lifecycle
    assert cached(content) == ["prepare", "base", "sft", "preferences", "ppo-1"]
    before, after = shas(first.lifecycle), shas(content)
    assert [name for name in NAMES if before[name] != after[name]] == ["ppo-2", "evaluate"]
    place = Path(content["stages"][4]["checkpoint"]["uri"])
    assert place.with_name(place.name + ".damaged-1").is_dir()
    assert content["registered"]["version"] == "2"
    audit = xray("audit", "--all", "--output", str(output), timeout=120)
    assert audit.code == 0, audit.out


@pytest.mark.long
def test_the_second_policy_is_compared_with_the_champion_and_promoted(
    first: Outcome, second: Outcome, output: Path
) -> None:
    """Both answer the same prompts on the real engines; what comes of it is a checkpoint like any other."""
    name, gates = "xray-tiny-policy", {"min_win_rate": None, "max_judge_drop": None, "max_regression": 0.5}
    place, node = resolve(f"{name}/1", output, None)
    promote(place, review(place, node, name=name, gates=PromotionConfig(**gates)), by="Ada", note="the first")
    options = [f"--set=promotion.{gate}={'null' if value is None else value}" for gate, value in gates.items()]
    done = xray("promote", "--output", str(output), "--name", name, "--by", "Ada", "--note", "better", *options)
    assert done.code == 0, done.err
    assert "over the champion" in done.out
    comparison = json.loads(next(output.glob("checkpoints/compare-*/comparison.json")).read_text())
    assert comparison["samples"] == 16
    assert comparison["win_rate_ci95"][0] <= comparison["win_rate"] <= comparison["win_rate_ci95"][1]
    place, node = resolve(f"{name}@champion", output, None)
    assert node.sha256 == resolve(f"{name}/2", output, None)[1].sha256
    assert resolve(f"{name}@previous", output, None)[1].sha256 == shas(first.lifecycle)["ppo-2"]
    assert roll_back(place, name=name, by="Ada", note="worse in use").version == "1"


@pytest.mark.long
def test_the_champion_is_served_and_followed_without_a_lost_request(first: Outcome, output: Path) -> None:
    """…after a changed checkpoint was refused; and nothing is left when it is told to stop."""
    name = "xray-tiny-policy"
    place, old = resolve(f"{name}@champion", output, None)
    new = resolve(f"{name}@previous", output, None)[1]
    with changed(old.directory / "model.safetensors"):
        refused = xray("serve", old.sha256, "--output", str(output), timeout=120)
    assert refused.code == 1
    assert f"refused: {old.name}: the audit found file-changed" in refused.err
    with serving(output, "champion") as server, Load(server.address, clients=6) as load:
        wait_for(lambda: all(len(shas) > 1 for shas in load.by_client()), server)
        before = len(load.answers)
        assert {answer.sha256 for answer in load.answers} == {old.sha256}
        roll_back(place, name=name, by="Ada", note="better after all")
        wait_for(lambda: all(shas[-1:] == [new.sha256] for shas in load.by_client()), server)
        after = len(load.answers)
        wait_for(lambda: len(load.answers) > after + 8, server)
    assert load.failures == []
    for answers in load.by_client():
        assert list(dict.fromkeys(answers)) == [old.sha256, new.sha256]
        assert answers == sorted(answers, key=[old.sha256, new.sha256].index)
    moved = min(answer.received for answer in load.answers if answer.sha256 == new.sha256)
    assert {answer.sha256 for answer in load.answers if answer.sent > moved} == {new.sha256}
    # Answers of the old one that ended when the new one had been asked already: they were under way as it moved.
    asked = min(answer.sent for answer in load.answers if answer.sha256 == new.sha256)
    during = [answer for answer in load.answers if answer.sha256 == old.sha256 and answer.received > asked]
    print(f"answers: {before} before, {len(during)} under way as it moved, {len(load.answers) - after} after")
    assert during
    assert server.code == 0
    assert server.left == []


def test_the_audit_is_sound_until_a_byte_has_changed(first: Outcome, output: Path) -> None:
    sound = xray("audit", "--all", "--output", str(output), "--json", timeout=120)
    assert sound.code == 0, sound.out
    published = [path for path in output.glob("checkpoints/*/manifest.json") if ".damaged" not in path.parent.name]
    assert json.loads(sound.out)["checkpoints"] == len(published) >= len(NAMES)
    tree = in_process("lineage", "xray-tiny-policy@candidate", "--output", output)
    assert tree.exit_code == 0, tree.output
    assert all(name in tree.output for name in NAMES[:-1])
    card = next(output.glob("checkpoints/ppo-2-*/README.md"))
    card.write_text(card.read_text() + "better than it is\n")
    broken = in_process("audit", "--all", "--output", output)
    assert broken.exit_code == 1
    assert "card-changed" in broken.output
