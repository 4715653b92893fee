"""What a statement says of a checkpoint, held against its manifest."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from xray_runtime.kernel.evidence.envelope import new_private_key, sign
from xray_runtime.kernel.evidence.statement import Statement, read_statement, statement_envelope
from xray_runtime.kernel.store.checkpoints import read_manifest
from xray_runtime.kernel.store.manifest import FileEntry

OTHER = "0" * 64
CHANGES: dict[str, Any] = {
    "stage": "another",
    "kind": "another",
    "type": "Dataset",
    "seed": 77,
    "functions": {"gold": {"module": OTHER}},
    "key": OTHER,
    "step": 77,
    "parents": {},
    "files": [],
}


@pytest.fixture(scope="module")
def policy(untouched: Path) -> Path:
    """A checkpoint with parents and files, and what lies beside it."""
    return next(untouched.glob("checkpoints/ppo-2-*"))


@pytest.mark.parametrize("fact", CHANGES)
def test_every_fact_in_which_they_differ_is_named(policy: Path, fact: str) -> None:
    statement, (manifest, sha256) = read_statement(policy), read_manifest(policy)
    assert statement.contradicts(manifest, sha256) == []
    assert statement.contradicts(manifest.model_copy(update={fact: CHANGES[fact]}), sha256) == [fact]


def test_digests_of_config_code_and_checkpoint_are_facts_too(policy: Path) -> None:
    statement, (manifest, sha256) = read_statement(policy), read_manifest(policy)
    assert statement.contradicts(manifest, OTHER) == ["checkpoint"]
    config = manifest.model_copy(update={"config": manifest.config | {"lr": 77}})
    assert statement.contradicts(config, sha256) == ["config", "config_digest"]
    code = manifest.model_copy(update={"code": manifest.code | {"more": OTHER}})
    assert statement.contradicts(code, sha256) == ["code_digest"]


def test_one_byte_more_in_the_list_of_files_is_named(policy: Path) -> None:
    statement, (manifest, sha256) = read_statement(policy), read_manifest(policy)
    first, *rest = manifest.files
    for files in (
        [first.model_copy(update={"sha256": OTHER}), *rest],
        [first.model_copy(update={"path": "elsewhere"}), *rest],
        [*manifest.files, FileEntry(path="more", sha256=OTHER, size=0)],
        rest,
    ):
        assert statement.contradicts(manifest.model_copy(update={"files": files}), sha256) == ["files"]


def test_only_checkpoints_are_parents(policy: Path) -> None:
    """Not what came from outside the store, though it has a digest and stands among the dependencies."""
    text = read_statement(policy).model_dump(mode="json", by_alias=True)
    dependencies = text["predicate"]["buildDefinition"]["resolvedDependencies"]
    before = read_statement(policy).parents
    assert before == read_manifest(policy)[0].parents
    for uri in ("file:///xray:x", None):
        dependencies.append({"name": "policy", "uri": uri, "digest": {"sha256": OTHER}})
    dependencies.append({"name": "without", "uri": "xray:x"})
    assert Statement.model_validate(text).parents == before


def test_its_one_text_is_in_the_names_of_in_toto_and_slsa(policy: Path) -> None:
    content = json.loads(statement_envelope(policy).payload)
    assert set(content) == {"_type", "subject", "predicateType", "predicate"}
    assert content["predicateType"] == "https://slsa.dev/provenance/v1"
    assert set(content["predicate"]) == {"buildDefinition", "runDetails"}
    assert set(content["predicate"]["runDetails"]) == {"builder", "metadata", "xray_run"}


def test_a_statement_with_nan_is_not_written(policy: Path) -> None:
    """In JSON it would be null, and a gate whose bound is null is off."""
    statement = read_statement(policy).model_dump()
    statement["predicate"]["details"]["run"]["gates"] = {"max_kl": math.nan}
    with pytest.raises(ValueError, match="not JSON compliant"):
        sign(Statement.model_validate(statement), new_private_key())
