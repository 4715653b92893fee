"""MLflow's pages of a registered model: what they say, and that the audit names every change."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest

from tests.unit.trust.promoting import broken, promoted
from tests.unit.trust.synthetic import NAME, Lifecycle
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.methods.evaluate.config import PromotionConfig
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.log import decide
from xray_runtime.trust.model_page import FORM
from xray_runtime.trust.promotion import decline, review


def client_of(output: Path) -> mlflow.MlflowClient:
    uri = f"sqlite:///{output / 'mlflow.db'}"
    return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def description(output: Path, version: str = "1") -> str:
    return str(client_of(output).get_model_version(NAME, version).description)


def test_a_version_says_what_it_is_made_from_and_how_it_did(fresh: Callable[[], Path]) -> None:
    output = fresh()
    graph = open_lineage_store(output, None).graph
    sha = {node.manifest.stage: sha256 for sha256, node in graph.nodes.items()}
    text = description(output)
    for role, stage in {"policy": "ppo-1", "prompts": "prepare", "reference": "sft", "rewards.0": "reward"}.items():
        assert f"| `{role}` | `{stage}` | `{sha[stage][:12]}` |" in text
    assert f"By `evaluate {sha['evaluate'][:12]}`" in text
    assert "| win rate over the model before | 0.6 (95%: 0.4 to 0.8) |" in text
    assert "Datasets: `own.jsonl`" in text
    assert "Not decided yet." in text
    assert re.search(
        r"\[its report and record\]\(#/experiments/\d+/runs/\w{32}/artifacts\?workflowType=machine_learning\)", text
    )
    tags = client_of(output).get_model_version(NAME, "1").tags
    assert tags["xray.evaluation"] == sha["evaluate"]
    assert tags["xray.signed_by"] in text
    assert "`xray promote` only" in tags["xray.promote"]
    assert (
        "xray promote --output DIR --name synthetic-policy" in client_of(output).get_registered_model(NAME).description
    )


def test_a_decision_stands_on_the_page_with_what_its_gates_saw(fresh: Callable[[], Path]) -> None:
    output = fresh()
    promoted(output, "ppo-2", min_win_rate=None)
    text = description(output)
    assert re.search(r"- promote, \S+, by a person: looks good", text)
    assert "    - `max_kl` passed: KL 1.250; at most 20.0" in text
    assert "Not decided yet" not in text
    assert broken(output) == []


def test_a_refusal_stands_on_the_page_without_its_markup(fresh: Callable[[], Path]) -> None:
    output = fresh()
    place, node = resolve("ppo-2", output, None)
    seen = review(place, node, name=NAME, gates=PromotionConfig(min_win_rate=None))
    decline(place, seen, by="a person", note="<script>alert(1)</script> [here](http://elsewhere)\n# no")
    text = description(output)
    assert r"\<script\>alert(1)\</script\> \[here\](http://elsewhere) \# no" in text
    assert broken(output) == []


def described(text: str) -> Callable[[Any], object]:
    return lambda client: client.update_model_version(NAME, "1", description=text)


TAMPERINGS: dict[str, tuple[Callable[[Any], object], str]] = {
    "description": (described("approved by the board"), "/1 its description"),
    "a tag more": (
        lambda client: client.set_model_version_tag(NAME, "1", "xray.approved", "yes"),
        "/1 tags: xray.approved",
    ),
    "a tag": (
        lambda client: client.set_model_version_tag(NAME, "1", "xray.evaluation", "ab" * 32),
        "/1 tags: xray.evaluation",
    ),
    "no warning": (lambda client: client.delete_model_version_tag(NAME, "1", "xray.promote"), "/1 tags: xray.promote"),
    "a stage": (
        lambda client: client.transition_model_version_stage(NAME, "1", "Production"),
        "/1 stage Production: X-ray sets none",
    ),
    "the model's": (
        lambda client: client.update_registered_model(NAME, description="promote as you like"),
        " its description",
    ),
    "the model's tag": (lambda client: client.delete_registered_model_tag(NAME, "xray.promote"), " tags: xray.promote"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", TAMPERINGS)
def test_the_audit_names_a_page_that_was_changed(name: str, fresh: Callable[[], Path]) -> None:
    output, (tamper, detail) = fresh(), TAMPERINGS[name]
    tamper(client_of(output))
    assert broken(output) == [f"registry-page-changed synthetic-policy{detail}"]
    # Also where only the policy is audited.
    place, node = resolve("ppo-2", output, None)
    assert [f.code for f in audit(place, [node]).findings if f.is_broken] == ["registry-page-changed"]


def test_registering_again_writes_the_page_anew(fresh: Callable[[], Path]) -> None:
    output = fresh()
    for name in ("description", "no warning"):
        TAMPERINGS[name][0](client_of(output))
    Lifecycle.resumed(output).register("ppo-2")
    assert broken(output) == []


def test_tags_of_users_are_left_alone(fresh: Callable[[], Path]) -> None:
    output = fresh()
    client_of(output).set_model_version_tag(NAME, "1", "team", "search")
    assert broken(output) == []


def test_a_version_of_an_older_release_has_no_page_and_may_not_claim_one(tmp_path: Path) -> None:
    output = tmp_path / "run"
    lifecycle = Lifecycle(output)
    lifecycle.policy = lifecycle.ppo()
    lifecycle.evaluate([f"question {i}" for i in range(50, 56)], "ppo-2")
    ref = lifecycle.done["ppo-2"]
    assert lifecycle.tracker is not None
    run_id = lifecycle.tracker.client.get_logged_model(ref.mlflow_model_id).source_run_id
    version = lifecycle.tracker.registry.register(NAME, ref, run_id, "candidate")
    signed = {"action": "register", "name": NAME, "alias": "candidate", "version": version}
    decide(output, checkpoint=ref.sha256, **signed)  # type: ignore[arg-type]
    lifecycle.record()
    assert broken(output) == []
    client_of(output).set_model_version_tag(NAME, "1", "xray.signed_by", "ab" * 32)
    assert broken(output) == ["registry-page-changed synthetic-policy/1 tags: xray.signed_by"]


def test_a_page_of_another_release_is_a_note(fresh: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    output = fresh()
    monkeypatch.setattr("xray_runtime.trust.model_page.FORM", 2)
    monkeypatch.setattr("xray_runtime.trust.audit.registry.FORM", 2)
    found = audit(open_lineage_store(output, None))
    assert found.is_sound
    assert "registry-page-unchecked" in {finding.code for finding in found.findings}
    # Registered again, it has the new form.
    Lifecycle.resumed(output).register("ppo-2")
    assert "registry-page-unchecked" not in {f.code for f in audit(open_lineage_store(output, None)).findings}


PINNED = "695bf1bb736b1ea6"


def test_the_wording_has_a_form(fresh: Callable[[], Path]) -> None:
    """Where this fails, count FORM on and pin the new wording."""
    text = re.sub(r"\b[0-9a-f]{12,}\b", "…", description(fresh()))
    assert (FORM, hashlib.sha256(text.encode()).hexdigest()[:16]) == (1, PINNED), text


def test_a_page_without_its_evaluation_is_named(fresh: Callable[[], Path]) -> None:
    output = fresh()
    shutil.rmtree(next(iter(output.glob("checkpoints/evaluate-*"))))
    assert any(
        re.match(
            r"registry-page-changed synthetic-policy/1 its page cannot be generated again: checkpoint \w{12} is", line
        )
        for line in broken(output)
    )
