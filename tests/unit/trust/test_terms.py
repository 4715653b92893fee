"""Licences along the lineage: inherited into cards, and in the way of a promotion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trust.synthetic import NAME, Lifecycle, examples
from xray_runtime.kernel.config.sources import SourceTerms
from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.kernel.evidence.statement import OutsideSource, read_statement, terms_of
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.kernel.store.content_digest import Outside
from xray_runtime.methods.evaluate.config import PromotionConfig
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.trust import promotion
from xray_runtime.trust.gates import NotPromoted, check_licenses

WEIGHTS = {"model.safetensors": b"weights"}


def source(field: str, name: str, **terms: str) -> list[OutsideSource]:
    return [OutsideSource(field=field, name=name, kind="hub", digest="ab" * 20, terms=SourceTerms(**terms))]


def family(tmp_path: Path) -> Lifecycle:
    """base (Apache-2.0) and prepare (MIT) → sft → ppo, rewarded by a judge of hub data under a licence of its own."""
    life = Lifecycle(tmp_path / "out", tracking=False)
    data = {"train.arrow": examples(range(5)), "heldout.arrow": examples(range(5, 7)), "stats.json": b"{}"}
    life.add("base", "base", WEIGHTS, {}, outside=source("base.model", "some/base", license="Apache-2.0"))
    chats = source("prepare.source", "some/chats", license="MIT", origin="a | b", personal_data="none")
    life.add("prepare", "prepare", data, {}, outside=chats)
    life.add("sft", "sft", WEIGHTS, {"base": "base", "data": "prepare"})
    life.add("judge", "reward_base", WEIGHTS, {}, outside=source("judge.model", "some/judge", license="CC-BY-NC-4.0"))
    life.add("ppo", "ppo", WEIGHTS, {"policy": "sft", "prompts": "prepare", "rewards.0": "judge"})
    return life


def test_a_card_names_the_terms_of_all_that_a_model_goes_back_to(tmp_path: Path) -> None:
    life = family(tmp_path)
    card = (life.done["ppo"].path / "README.md").read_text()
    assert "| `some/chats` (prepare.source) | MIT | a \\| b | none |" in card
    assert "| `some/base` (base.model) | Apache-2.0 | not stated | not stated |" in card
    assert "CC-BY-NC-4.0" in card
    assert "CC-BY-NC-4.0" not in (life.done["sft"].path / "README.md").read_text()
    dependencies = read_statement(life.done["prepare"].path).predicate.build.dependencies
    assert dependencies[0].annotations["license"] == "MIT"


@pytest.mark.parametrize(
    ("allowed", "conflicting"),
    [
        (["mit", "apache-2.0", "CC-BY-NC-4.0"], []),
        (["MIT", "Apache-2.0"], ["some/judge (judge.model) has the licence CC-BY-NC-4.0: judge → ppo"]),
        (["Apache-2.0", "CC-BY-NC-4.0"], ["some/chats (prepare.source) has the licence MIT: prepare → ppo"]),
        ([], ["some/base", "some/chats", "some/judge"]),
    ],
)
def test_a_licence_that_is_not_allowed_is_named_with_its_path(
    tmp_path: Path, allowed: list[str], conflicting: list[str]
) -> None:
    life = family(tmp_path)
    graph = open_lineage_store(life.output, None).graph
    gate = check_licenses(graph, life.done["ppo"].sha256, allowed)
    plain = gate.reason
    for name, ref in life.done.items():
        plain = plain.replace(f"{name} {ref.sha256[:12]}", name)
    assert gate.passed is not bool(conflicting)
    assert all(text in plain for text in conflicting)
    assert "some/base (base.model)" not in plain or "Apache-2.0" not in allowed


def test_the_path_leads_over_every_checkpoint_between(tmp_path: Path) -> None:
    life = family(tmp_path)
    graph = open_lineage_store(life.output, None).graph
    reason = check_licenses(graph, life.done["ppo"].sha256, ["MIT", "CC-BY-NC-4.0"]).reason
    way = " → ".join(f"{name} {life.done[name].sha256[:12]}" for name in ("base", "sft", "ppo"))
    assert reason == f"some/base (base.model) has the licence Apache-2.0: {way}; allowed: MIT, CC-BY-NC-4.0"


def test_the_path_is_the_shortest(tmp_path: Path) -> None:
    life = Lifecycle(tmp_path / "out", tracking=False)
    life.add("base", "base", WEIGHTS, {}, outside=source("base.model", "some/base"))
    life.add("between", "sft", WEIGHTS, {"base": "base"})
    life.add("sft", "sft", WEIGHTS, {"base": "between"})
    life.add("aside", "sft", WEIGHTS, {"base": "base"})
    tuned = life.add("tuned", "ppo", WEIGHTS, {"policy": "sft", "reference": "between"})
    reason = check_licenses(open_lineage_store(life.output, None).graph, tuned.sha256, ["MIT"]).reason
    way = " → ".join(f"{name} {life.done[name].sha256[:12]}" for name in ("base", "between", "tuned"))
    assert reason.startswith(f"some/base (base.model) has no licence on record: {way}; ")


def test_no_licence_on_record_and_no_record_are_conflicts(tmp_path: Path) -> None:
    life = Lifecycle(tmp_path / "out", tracking=False)
    life.add("base", "base", WEIGHTS, {}, outside=source("base.model", "some/base"))
    ppo = life.add("ppo", "ppo", WEIGHTS, {"policy": "base"})
    graph = open_lineage_store(life.output, None).graph
    assert "some/base (base.model) has no licence on record" in check_licenses(graph, ppo.sha256, ["MIT"]).reason
    (life.done["base"].path / "attestation" / "statement.json").unlink()
    graph = open_lineage_store(life.output, None).graph
    assert "has no statement" in check_licenses(graph, ppo.sha256, ["MIT"]).reason


def test_promotion_is_stopped(fresh: Callable[[], Path]) -> None:
    output = fresh()
    store = open_lineage_store(output, None)
    _, node = resolve(f"{NAME}@candidate", output, None)
    gates = PromotionConfig(min_win_rate=0.3, allowed_licenses=["MIT"])
    with pytest.raises(NotPromoted, match=r"own.jsonl \(prepare.source\) has no licence on record: prepare \w+ → ppo"):
        promotion.review(store, node, name=NAME, gates=gates)
    allowed = gates.model_copy(update={"allowed_licenses": None})
    assert "allowed_licenses" not in {
        gate.name for gate in promotion.review(store, node, name=NAME, gates=allowed).gates
    }


def test_a_package_says_its_own_licence_unless_one_is_declared() -> None:
    import importlib.metadata

    installed = f"chitchat-dataset=={importlib.metadata.version('chitchat-dataset')}"
    found = Outside(kind="package", name="chitchat", digest=installed, field="prepare.source", holds="dataset")
    assert terms_of(found, None) == SourceTerms(license="MIT", origin=f"the package {installed}")
    assert terms_of(found, SourceTerms(license="CC0-1.0")).license == "CC0-1.0"
    assert terms_of(found.model_copy(update={"kind": "file"}), None) == SourceTerms()


def test_terms_are_of_what_the_config_reads() -> None:
    config = validate_as(LifecycleConfig, {"terms": {"chitchat": {"license": "MIT"}}})
    assert config.terms["chitchat"].license == "MIT"
    with pytest.raises(ConfigError, match="terms: 'chitchta' is not a source in the config: must be one of chitchat"):
        validate_as(LifecycleConfig, {"terms": {"chitchta": {"license": "MIT"}}})
    with pytest.raises(ConfigError, match=r"terms.chitchat.licence: unknown field \(did you mean license\?\)"):
        validate_as(LifecycleConfig, {"terms": {"chitchat": {"licence": "MIT"}}})
