"""MLflow's own store says what came from what: a real SQLite database, read back through MLflow's client."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from matplotlib.figure import Figure

from xray_runtime.kernel.credentials import TRACKING, tracking_address
from xray_runtime.kernel.store.checkpoints import Store, load_manifest
from xray_runtime.kernel.store.identity import Identity, digest
from xray_runtime.kernel.store.ref import CheckpointRef
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.kernel.tracking.mlflow_tracker import Tracker, flatten
from xray_runtime.kernel.tracking.recorder import StageRecorder, records_directory

numbers = itertools.count()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(scope="module")
def tracker(root: Path) -> Iterator[Tracker]:
    before = mlflow.get_tracking_uri()
    yield Tracker(f"sqlite:///{root / 'mlflow.db'}", "xray-test", root / "artifacts")
    mlflow.set_tracking_uri(before)


@pytest.mark.parametrize("named", [None, "http://mlflow.lan:5000"])
def test_the_next_run_of_a_process_does_not_inherit_the_store(
    named: str | None, tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # MLflow itself writes the address of the last store into the variable.
    if named is not None:
        monkeypatch.setenv(TRACKING, named)
    before = mlflow.get_tracking_uri()
    Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}", "another", tmp_path)
    assert mlflow.get_tracking_uri().endswith(f"{tmp_path.name}/mlflow.db")
    assert tracking_address() == named
    Tracker(before, "xray-test", None)


@pytest.fixture
def lifecycle(tracker: Tracker) -> str:
    """A parent run of its own."""
    return tracker.start_lifecycle(None, "test", {"seed": 0}, "seed: 0\n", {})


def publish(root: Path, stage: str, parents: list[CheckpointRef], dataset: CheckpointRef | None = None) -> Any:
    """A real checkpoint that nobody has published before."""
    store = Store(root / "checkpoints")
    identity = Identity(
        stage=stage,
        kind=stage.split("-")[0],
        config={"lr": 1e-3, "number": next(numbers)},
        seed=3,
        parents={parent.stage: parent.sha256 for parent in parents},
        functions={},
        code={},
        versions={},
    )
    with store.building(stage, identity.key) as built:
        (built / "model.bin").write_text(identity.key)
        dataset_sha256 = dataset.sha256 if dataset else None
        return store.publish(built, identity, type="Model", step=7, dataset=dataset_sha256)


def log(tracker: Tracker, parent_run_id: str, ref: CheckpointRef, parents: list[CheckpointRef]) -> CheckpointRef:
    """The stage of `ref` as a finished child run."""
    manifest = load_manifest(ref.path)
    run = tracker.stage_run(parent_run_id, ref.stage, manifest.key, manifest.config)
    logged = run.log_checkpoint(ref, manifest, parents)
    run.finish("FINISHED")
    return logged


def linked(tracker: Tracker, run_id: str) -> tuple[list[str], list[tuple[str, int]], list[tuple[str, str]]]:
    """(models that went in, (model, step) that came out, (name, whole sha256) of datasets) of a run."""
    run = tracker.client.get_run(run_id)
    return (
        sorted(i.model_id for i in run.inputs.model_inputs),
        [(o.model_id, o.step) for o in run.outputs.model_outputs],
        [(d.dataset.name, {t.key: t.value for t in d.tags}["xray.sha256"]) for d in run.inputs.dataset_inputs],
    )


def test_an_experiment_is_made_once(tracker: Tracker, root: Path) -> None:
    again = Tracker(f"sqlite:///{root / 'mlflow.db'}", "xray-test", None)
    assert again.experiment_id == tracker.experiment_id
    experiment = tracker.client.get_experiment_by_name("xray-test")
    assert experiment.artifact_location == (root / "artifacts").as_uri()


def test_a_lifecycle_carries_its_config(tracker: Tracker) -> None:
    # More fields than MLflow takes in one request, one longer than it takes in one param.
    config = {
        "lr": 1e-3,
        "stages": [{"lr": 0.1}, {"lr": 0.2}],
        "many": {f"f{i}": i for i in range(150)},
        "x": "y" * 7000,
    }
    run_id = tracker.start_lifecycle(None, "demo seed 1", config, "lr: 0.001\n", {"xray.output": "/out"})
    run = tracker.client.get_run(run_id)
    assert run.info.run_name == "demo seed 1"
    assert run.data.tags["xray.output"] == "/out"
    params = run.data.params
    assert (params["lr"], params["stages.0.lr"], params["stages.1.lr"]) == ("0.001", "0.1", "0.2")
    assert [params[f"many.f{i}"] for i in range(150)] == [str(i) for i in range(150)]
    assert params["x"] == "y" * 6000
    local = tracker.client.download_artifacts(run_id, "config.yaml")
    assert Path(local).read_text() == "lr: 0.001\n"
    tracker.finish(run_id, "FAILED")
    assert tracker.client.get_run(run_id).info.status == "FAILED"


def test_flatten_by_hand() -> None:
    nested = {"a": 1, "b": {"c": None, "d": [True, {"e": 0.5}]}, "f": {}, "g": []}
    assert flatten(nested) == {"a": "1", "b.c": "None", "b.d.0": "True", "b.d.1.e": "0.5", "f": "{}", "g": "{}"}


def test_every_attempt_at_a_key_is_one_run(tracker: Tracker, lifecycle: str) -> None:
    first = tracker.stage_run(lifecycle, "sft", "ab" * 32, {"sft": {"lr": 1e-3}})
    first.metrics([(0, 1, {"sft/loss": 2.0})])
    first.finish("FAILED")
    second = tracker.stage_run(lifecycle, "sft", "ab" * 32, {"sft": {"lr": 1e-3}})
    assert second.run_id == first.run_id
    run = tracker.client.get_run(first.run_id)
    assert run.info.status == "RUNNING"
    assert run.info.run_name == "sft"
    assert run.data.params == {"sft.lr": "0.001", "key": "ab" * 32}
    assert run.data.tags["mlflow.parentRunId"] == lifecycle
    # Another key, or the same one in another lifecycle, is another run.
    assert tracker.stage_run(lifecycle, "sft", "cd" * 32, {}).run_id != first.run_id
    other = tracker.start_lifecycle(None, "other", {}, "", {})
    assert tracker.stage_run(other, "sft", "ab" * 32, {}).run_id != first.run_id


def test_metrics_keep_their_steps(tracker: Tracker, lifecycle: str) -> None:
    run = tracker.stage_run(lifecycle, "sft", "01" * 32, {})
    # More in all, and in one step, than MLflow takes in one request.
    points = [(step, 1000 + step, {"sft/loss": 1.0 / (step + 1), "sft/lr": step * 0.5}) for step in range(600)]
    run.metrics([*points, (600, 1600, {"sft/odd": math.nan})])
    run.metrics([(0, 1, {f"many/m{i}": i for i in range(1200)})])
    # Sent again, as after an interruption: nothing is doubled.
    run.metrics(points)
    run.finish("FINISHED")
    history = tracker.client.get_metric_history(run.run_id, "sft/loss")
    assert sorted((m.step, m.value) for m in history) == [(step, 1.0 / (step + 1)) for step in range(600)]
    last = tracker.client.get_run(run.run_id).data.metrics
    assert last["sft/lr"] == 299.5
    assert [last[f"many/m{i}"] for i in range(1200)] == list(range(1200))
    assert math.isnan(tracker.client.get_metric_history(run.run_id, "sft/odd")[0].value)


def test_a_checkpoint_is_linked_to_what_it_came_from(tracker: Tracker, lifecycle: str, root: Path) -> None:
    dataset = log(tracker, lifecycle, publish(root, "prepare", []), [])
    base = log(tracker, lifecycle, publish(root, "base", []), [])
    ref = publish(root, "sft", [base, dataset], dataset)
    manifest = load_manifest(ref.path)
    run = tracker.stage_run(lifecycle, "sft", manifest.key, manifest.config)
    logged = run.log_checkpoint(ref, manifest, [base, dataset])
    assert logged == ref.model_copy(update={"mlflow_model_id": logged.mlflow_model_id})
    model = tracker.client.get_logged_model(logged.mlflow_model_id)
    assert (model.name, model.model_type, str(model.status)) == ("xray-test-sft", "sft", "READY")
    assert model.source_run_id == run.run_id
    assert model.params == {
        "sha256": ref.sha256,
        "uri": ref.uri,
        "key": manifest.key,
        "config_digest": digest(manifest.config),
        "statement_sha256": "",  # published without one
        "code_digest": manifest.code_digest,
        "seed": "3",
        "dataset_sha256": dataset.sha256,
        "parent.base": base.sha256,
        "parent.prepare": dataset.sha256,
    }
    expected = (
        sorted([base.mlflow_model_id, dataset.mlflow_model_id]),
        [(logged.mlflow_model_id, 7)],
        [("prepare", dataset.sha256)],
    )
    assert linked(tracker, run.run_id) == expected
    local = tracker.client.download_artifacts(run.run_id, "manifest.json")
    assert Path(local).read_bytes() == (ref.path / "manifest.json").read_bytes()
    # An attempt that failed after this is followed by another: linking again changes nothing.
    run.link(logged, manifest, [base, dataset])
    assert linked(tracker, run.run_id) == expected


def test_a_parent_in_two_roles_is_one_input(tracker: Tracker, lifecycle: str, root: Path) -> None:
    sft = log(tracker, lifecycle, publish(root, "sft", []), [])
    ref = publish(root, "ppo-1", [sft])
    manifest = load_manifest(ref.path)
    run = tracker.stage_run(lifecycle, "ppo-1", manifest.key, {})
    logged = run.log_checkpoint(ref, manifest, [sft, sft])
    assert linked(tracker, run.run_id) == ([sft.mlflow_model_id], [(logged.mlflow_model_id, 7)], [])


def test_a_cached_stage_shows_the_model_that_was_there(tracker: Tracker, lifecycle: str, root: Path) -> None:
    dataset = log(tracker, lifecycle, publish(root, "prepare", []), [])
    ref = log(tracker, lifecycle, publish(root, "sft", [dataset], dataset), [dataset])
    manifest = load_manifest(ref.path)
    again = tracker.start_lifecycle(None, "again", {}, "", {})
    run = tracker.stage_run(again, "sft", manifest.key, manifest.config)
    assert ref.mlflow_model_id is not None
    assert tracker.has_model(ref.mlflow_model_id)
    for _ in range(2):
        run.link_cached(ref, manifest, [dataset])
    run.finish("FINISHED")
    assert linked(tracker, run.run_id) == (
        [dataset.mlflow_model_id],
        [(ref.mlflow_model_id, 7)],
        [("prepare", dataset.sha256)],
    )
    found = tracker.client.get_run(run.run_id)
    assert (found.info.status, found.data.tags["xray.cached"]) == ("FINISHED", "true")
    # The run of the whole lifecycle shows the dataset too, once.
    for _ in range(2):
        tracker.log_datasets(again)
    assert linked(tracker, again) == ([], [], [("prepare", dataset.sha256)])
    # The model is still the one of the run that made it.
    assert tracker.client.get_logged_model(ref.mlflow_model_id).source_run_id != run.run_id


def test_a_model_of_another_store_is_unknown(tracker: Tracker) -> None:
    assert not tracker.has_model("m-" + "0" * 32)


def test_a_checkpoint_is_registered_once_and_the_alias_follows(tracker: Tracker, lifecycle: str, root: Path) -> None:
    first, second = (log(tracker, lifecycle, publish(root, "ppo-1", []), []) for _ in range(2))

    def candidate() -> Any:
        return tracker.client.get_model_version_by_alias("test-policy", "candidate")

    assert tracker.registry.register("test-policy", first, lifecycle, "candidate") == "1"
    assert tracker.registry.register("test-policy", first, lifecycle, "candidate") == "1"
    assert candidate().version == 1
    assert candidate().source == f"models:/{first.mlflow_model_id}"
    assert candidate().tags == {"xray.sha256": first.sha256, "xray.uri": first.uri}
    assert tracker.registry.register("test-policy", second, lifecycle, "candidate") == "2"
    assert candidate().tags["xray.sha256"] == second.sha256
    # Back to the first: no new version, the alias alone moves.
    assert tracker.registry.register("test-policy", first, lifecycle, "candidate") == "1"
    assert candidate().tags["xray.sha256"] == first.sha256
    assert len(tracker.client.search_model_versions("name = 'test-policy'")) == 2
    # Under another name it is another model.
    assert tracker.registry.register("other-policy", second, lifecycle, "candidate") == "1"


def test_a_stage_records_to_files_and_mlflow(tracker: Tracker, lifecycle: str, tmp_path: Path) -> None:
    key = "ef" * 32
    run = tracker.stage_run(lifecycle, "sft", key, {})
    seen: list[Any] = []
    recorder = StageRecorder(
        tmp_path, "sft", key, run, lambda *progress: seen.append(progress), every=1, seal=process_seal()
    )
    recorder.begin()
    recorder.metrics({"sft/loss": 2, "sft/lr": 0.5}, 0)
    recorder.metrics({"sft/loss": 1.5}, 1)
    recorder.table("samples", ["prompt", "reply"], [["wie geht's?", "gut <b>"], ["日本", "…"]])
    figure = Figure()
    figure.add_subplot().plot([1, 2], [3, 4])
    recorder.figure("lengths", figure)
    recorder.curves("<svg>loss</svg>\n<svg>lr</svg>", "<svg>both</svg>")
    recorder.send()
    run.finish("FINISHED", recorder.attempt)
    recorder.close()
    directory = records_directory(tmp_path, "sft", key)
    assert directory == tmp_path / "records" / f"sft-{key[:12]}"
    lines = [json.loads(line) for line in recorder.metrics_path.read_text().splitlines()]
    assert [{k: v for k, v in line.items() if k != "time_ms"} for line in lines] == [
        {"step": 0, "metrics": {"sft/loss": 2.0, "sft/lr": 0.5}},
        {"step": 1, "metrics": {"sft/loss": 1.5}},
    ]
    table = json.loads((directory / "samples.json").read_text(encoding="utf-8"))
    assert table == {"columns": ["prompt", "reply"], "rows": [["wie geht's?", "gut <b>"], ["日本", "…"]]}
    assert (directory / "metrics.svg").read_text() == "<svg>loss</svg>\n<svg>lr</svg>"
    assert (directory / "training.svg").read_text() == "<svg>both</svg>"
    assert {a.path for a in tracker.client.list_artifacts(run.run_id)} == {
        "samples.json",
        "lengths.png",
        "training.svg",
    }
    assert (directory / "lengths.png").read_bytes().startswith(b"\x89PNG")
    logged = json.loads(Path(tracker.client.download_artifacts(run.run_id, "samples.json")).read_text(encoding="utf-8"))
    assert logged == {"columns": ["prompt", "reply"], "data": [["wie geht's?", "gut <b>"], ["日本", "…"]]}
    assert tracker.client.get_run(run.run_id).data.metrics == {"sft/loss": 1.5, "sft/lr": 0.5}


def test_another_attempt_replaces_a_table(tracker: Tracker, lifecycle: str) -> None:
    for attempt in ("first", "second"):
        run = tracker.stage_run(lifecycle, "evaluate", "03" * 32, {})
        run.table("samples", ["prompt"], [[attempt]])
        run.table("others", ["prompt"], [[attempt]])
        run.finish("FAILED")
    local = tracker.client.download_artifacts(run.run_id, "samples.json")
    assert json.loads(Path(local).read_text()) == {"columns": ["prompt"], "data": [["second"]]}
    # MLflow itself takes both for tables.
    for name in ("samples", "others"):
        table = tracker.client.load_table(tracker.experiment_id, f"{name}.json", [run.run_id])
        assert table.to_dict("list") == {"prompt": ["second"]}
