"""Promotion, retention and bundles."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest

from tests.unit.lineage.synthetic import NAME, Lifecycle
from xray_runtime.config_io import ConfigError
from xray_runtime.lineage.audit import audit
from xray_runtime.lineage.bundle import audit_bundle, export, import_bundle
from xray_runtime.lineage.promotion import Gates, NotPromoted, promote, roll_back
from xray_runtime.lineage.reference import Place, open_place, resolve
from xray_runtime.lineage.retention import plan_prune, prune


def aliases(output: Path) -> dict[str, str]:
    uri = f"sqlite:///{output / 'mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    return {alias: str(version) for alias, version in client.get_registered_model(NAME).aliases.items()}


def broken(output: Path) -> list[str]:
    return [f"{f.code} {f.subject} {f.detail}" for f in audit(open_place(output, None)).findings if f.is_broken]


def promoted(output: Path, stage: str, **gates: float | None) -> None:
    place, node = resolve(stage, output, None)
    promote(place, node, name=NAME, gates=Gates(**gates), by="a person", note="looks good")


def second_candidate(output: Path) -> str:
    """Another policy, evaluated and registered; returns its stage."""
    lifecycle = Lifecycle(output).whole()
    roles = {"policy": "ppo-2", "reference": "sft", "reward": "reward", "dataset": "prepare"}
    lifecycle.add("ppo-3", "ppo", {"config.json": b"{}", "model.safetensors": b"third"}, roles)
    lifecycle.evaluate([f"question {i}" for i in range(50, 56)], policy="ppo-3", stage="evaluate-3", win_rate=0.62)
    lifecycle.register("ppo-3")
    return "ppo-3"


def test_a_sound_candidate_is_promoted_and_rolled_back(fresh: Callable[[], Path]) -> None:
    output = fresh()
    promoted(output, "ppo-2", min_win_rate=0.4)
    assert aliases(output) == {"candidate": "1", "champion": "1"}
    promoted(output, second_candidate(output), min_win_rate=0.4)
    assert aliases(output) == {"candidate": "2", "champion": "2", "previous": "1"}
    assert broken(output) == []
    decision = roll_back(open_place(output, None), name=NAME, by="a person", note="worse than it looked")
    assert decision.version == "1"
    assert aliases(output) == {"candidate": "2", "champion": "1", "previous": "2"}
    assert broken(output) == []


@pytest.mark.parametrize(
    ("gates", "reason"),
    [
        ({"min_win_rate": 0.5}, "win rate 0.600, 95% from 0.400; at least 0.5"),
        ({"min_win_rate": None, "max_kl": 1.0}, "KL 1.250; at most 1.0"),
        ({"min_win_rate": None, "max_length_ratio": 1.1}, "length 8.0 → 10.0; ratio at most 1.1"),
        ({"min_win_rate": None}, "learned reward +1.000, gold score -0.100; a fall of at most 0.0"),
    ],
)
def test_a_gate_that_does_not_hold_stops_it(
    gates: dict[str, float | None], reason: str, fresh: Callable[[], Path], tmp_path: Path
) -> None:
    output = fresh()
    if "gold" in reason:
        output = tmp_path / "hacked"
        Lifecycle(output).whole(gold_delta=-0.1)
    with pytest.raises(NotPromoted) as error:
        promoted(output, "ppo-2", **gates)
    assert error.value.reasons == [reason]
    assert "champion" not in aliases(output)


def test_a_candidate_worse_than_the_champion_is_stopped(fresh: Callable[[], Path]) -> None:
    output = fresh()
    promoted(output, "ppo-2", min_win_rate=None)
    stage = second_candidate(output)
    promoted(output, stage, min_win_rate=None, max_regression=0.0)
    place, node = resolve("ppo-2", output, None)
    with pytest.raises(NotPromoted, match=r"win rate 0.600, champion's 0.620; at most 0.0 below"):
        promote(place, node, name=NAME, gates=Gates(min_win_rate=None, max_regression=0.0), by="x", note="")


def test_an_unsound_candidate_is_not_promoted(fresh: Callable[[], Path]) -> None:
    output = fresh()
    weights = next(iter(output.glob("checkpoints/base-*/model.safetensors")))
    weights.write_bytes(b"other")
    with pytest.raises(NotPromoted, match=r"file-changed \(base"):
        promoted(output, "ppo-2", min_win_rate=None)


def test_pruning_keeps_chains_whole(fresh: Callable[[], Path]) -> None:
    output = fresh()
    lifecycle = Lifecycle(output).whole()
    lifecycle.add("trial", "ppo", {"model.safetensors": b"trial"}, {"policy": "ppo-1", "dataset": "prepare"})
    lifecycle.add("trial-2", "ppo", {"model.safetensors": b"trial 2"}, {"policy": "trial", "dataset": "prepare"})
    place = open_place(output, None)
    plan = plan_prune(place, [])
    assert [node.manifest.stage for node in plan.remove] == ["trial-2", "trial"]
    assert plan.bytes == len(b"trial") + len(b"trial 2")
    assert plan_prune(place, [resolve("trial-2", output, None)[1]]).remove == []
    prune(place, plan)
    assert len(list((output / "checkpoints").iterdir())) == 8
    assert broken(output) == []


def _bundle(output: Path, path: Path) -> Path:
    place, node = resolve("ppo-2", output, None)
    assert export(place, node, path) == 8
    return path


def test_a_bundle_is_checked_without_mlflow_and_imported_with_its_lineage(
    fresh: Callable[[], Path], tmp_path: Path
) -> None:
    bundle = _bundle(fresh(), tmp_path / "policy.tar")
    result = audit_bundle(bundle)
    assert result.is_sound
    assert result.checkpoints == 8
    other = tmp_path / "other"
    Lifecycle(other).add("own", "ppo", {"model.safetensors": b"own"}, {})
    uri = f"sqlite:///{other / 'mlflow.db'}"
    for _ in range(2):
        assert import_bundle(bundle, other, tracking_uri=uri, experiment="imported", public=None).is_sound
    assert broken(other) == []
    assert len(open_place(other, None).graph.nodes) == 9


def test_a_tampered_bundle_is_named_and_not_imported(fresh: Callable[[], Path], tmp_path: Path) -> None:
    output = fresh()
    weights = next(iter(output.glob("checkpoints/sft-*/model.safetensors")))
    weights.write_bytes(weights.read_bytes()[::-1])
    bundle = _bundle(output, tmp_path / "policy.tar")
    assert {f.code for f in audit_bundle(bundle).findings if f.is_broken} == {"file-changed"}
    other = tmp_path / "other"
    uri = f"sqlite:///{other / 'mlflow.db'}"
    assert not import_bundle(bundle, other, tracking_uri=uri, experiment="imported", public=None).is_sound
    assert list((other / "checkpoints").iterdir()) == []


def test_a_bundle_of_another_signer_is_refused_by_key(fresh: Callable[[], Path], tmp_path: Path) -> None:
    bundle = _bundle(fresh(), tmp_path / "policy.tar")
    own = Lifecycle(tmp_path / "own", tracking=False)
    found = audit_bundle(bundle, own.output / "keys" / "signing.pub")
    assert {f.code for f in found.findings if f.is_broken} == {"signature-foreign"}


@pytest.mark.parametrize("kind", ["parent", "absolute", "link", "device", "text", "empty"])
def test_hostile_bundles_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar"
    member = tarfile.TarInfo({"parent": "../escaped", "absolute": str(tmp_path / "escaped")}.get(kind, "x"))
    if kind == "link":
        member.type, member.linkname = tarfile.SYMTYPE, "/etc"
    if kind == "device":
        member.type = tarfile.CHRTYPE
    if kind == "text":
        path.write_text("no archive")
    else:
        with tarfile.open(path, "w") as archive:
            if kind != "empty":
                archive.addfile(member)
    with pytest.raises(ConfigError):
        audit_bundle(path)
    assert not (tmp_path / "escaped").exists()
    assert not os.path.exists("/escaped")


def test_a_broken_chain_is_not_exported(fresh: Callable[[], Path], tmp_path: Path) -> None:
    output = fresh()
    shutil.rmtree(next(iter(output.glob("checkpoints/base-*"))))
    place, node = resolve("ppo-2", output, None)
    with pytest.raises(ConfigError, match="the chain is broken"):
        export(place, node, tmp_path / "policy.tar")


def test_places_without_mlflow_are_told_so(fresh: Callable[[], Path]) -> None:
    output = fresh()
    place, node = resolve("ppo-2", output, None)
    with pytest.raises(ConfigError, match="--tracking-uri"):
        promote(Place(place.output, place.graph, None), node, name=NAME, gates=Gates(), by="x", note="")
