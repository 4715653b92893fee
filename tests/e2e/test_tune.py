"""`xray tune` through the real command: killed in the middle of a trial, gone on with, shared stages computed once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import optuna
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from tests.e2e.conftest import ROOT, XRAY, environment, xray
from tests.waiting import wait_until
from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.kernel.graph.stage_identity import identify
from xray_runtime.kernel.store.digest_memory import DigestMemory
from xray_runtime.methods.loading import load_config

pytestmark = pytest.mark.long

SEARCH = {
    "fields": {"sft.lr": {"choices": [4e-3, 1e-6]}, "sft.batch_size": {"low": 8, "high": 32}},
    "until": "sft",
    "metric": "sft/heldout_loss",
    "mode": "min",
    "seed": 8,
    "trials": 3,
    # A rate of 1e-6 learns nothing: the third trial has it, and is ended.
    "prune": {"after_steps": 13, "min_trials": 2},
}


def finished(output: Path) -> list[str]:
    """Names of the directories of the trials that finished."""
    storages = [JournalStorage(JournalFileBackend(str(path))) for path in output.glob("searches/*/journal.jsonl")]
    studies = [
        optuna.load_study(study_name=s.study_name, storage=one) for one in storages for s in one.get_all_studies()
    ]
    trials = [trial for study in studies for trial in study.get_trials(states=(TrialState.COMPLETE,))]
    return [trial.user_attrs["directory"] for trial in trials]


def key_of(best: Path, stage: str, checkpoints: dict[str, str]) -> str:
    graph = recorded_graph(load_config(best))
    call = graph.calls[stage]
    parents = {role: checkpoints[handle.name] for role, handle in call.parents.items()}
    runtime = graph.runtime.model_copy(update={"device": "cpu"})
    memory = DigestMemory(best.with_name("digests.sqlite"))
    return identify(call.kind, stage, call.config, call.seed, runtime, parents, {}, memory)[0].key


def test_a_killed_search_goes_on(tmp_path: Path) -> None:
    import mlflow

    output, search = tmp_path / "run", tmp_path / "rates.yaml"
    search.write_text(yaml.safe_dump(SEARCH, sort_keys=False))
    command = ["tune", "configs/tiny.yaml", "--search", str(search), "--output", str(output)]
    command += ["--set", "sft.steps=60", "--set", "runtime.snapshot_every=5", "--json"]
    process = subprocess.Popen(
        [XRAY, *command], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(
            lambda: finished(output) and list(output.glob("snapshots/sft-*/step-*/files.json")),
            seconds=500,
            process=process,
            why="no second trial came as far as a snapshot",
            pause_s=0.02,
        )
    finally:
        process.kill()
        process.wait()
    (first,) = finished(output)
    summary = output / "searches" / "rates" / "trials" / first / "lifecycle.json"
    written = summary.stat().st_mtime_ns

    outcome = xray(*command)
    assert outcome.code == 0, outcome.err
    results = json.loads(outcome.out)
    assert results == json.loads((output / "searches" / "rates" / "results.json").read_text())
    trials = results["trials"]
    assert [trial["state"] for trial in trials] == ["finished", "finished", "pruned"]
    assert all(trial["values"]["sft.lr"] == (4e-3 if trial["state"] == "finished" else 1e-6) for trial in trials)
    assert Path(trials[0]["directory"]).name == first
    assert summary.stat().st_mtime_ns == written, "a finished trial was run again"
    journals = [json.loads((Path(trial["directory"]) / "lifecycle.json").read_text()) for trial in trials]
    stages = [{stage["name"]: stage for stage in summary["stages"]} for summary in journals]
    assert [name for name, stage in stages[0].items() if not stage["cached"]] == ["prepare", "base", "sft"]
    assert stages[1]["prepare"]["cached"]
    assert stages[1]["base"]["cached"]
    assert stages[1]["sft"]["attempts"] == 2
    assert set(stages[2]) == {"prepare", "base"}
    assert not list(output.glob("snapshots/*"))

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{output / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("xray-tiny").experiment_id
    runs = {run.info.run_id: run for run in client.search_runs([experiment], "tags.`xray.search` = 'rates'")}
    assert set(runs) == {trial["run_id"] for trial in trials}
    assert [runs[trial["run_id"]].info.status for trial in trials] == ["FINISHED", "FINISHED", "KILLED"]
    for trial in trials[:2]:
        run = runs[trial["run_id"]]
        assert run.data.metrics["search/value"] == trial["value"]
        assert run.data.params["sft.batch_size"] == str(trial["values"]["sft.batch_size"])

    best = trials[results["best"]["number"]]
    assert best["value"] == min(trial["value"] for trial in trials[:2])
    found = stages[best["number"]]
    checkpoints = {name: stage["checkpoint"]["sha256"] for name, stage in found.items()}
    assert found["sft"]["key"] == key_of(output / "searches" / "rates" / "best.yaml", "sft", checkpoints)
    assert (output / "searches" / "rates" / "search.png").read_bytes().startswith(b"\x89PNG")


def test_a_search_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    search = tmp_path / "rates.yaml"
    search.write_text(yaml.safe_dump(SEARCH | {"fields": {"sft.lr": {"low": -1, "high": 1}}}))
    outcome = xray("tune", "configs/tiny.yaml", "--search", str(search), "--output", str(tmp_path / "run"), timeout=60)
    assert outcome.code == 2
    assert outcome.err.strip() == f"error: {search}: sft.lr: -1 is not allowed: must be greater than 0"
    assert not (tmp_path / "run").exists()
