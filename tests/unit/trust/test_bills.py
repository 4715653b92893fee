"""What a bundle says in public forms, checked by the validators of those forms."""

from __future__ import annotations

import json
import re
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import jsonschema
import mlcroissant
import pytest
import torch
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from referencing import Registry, Resource
from safetensors.torch import save
from spdx_python_model import v3_0_1 as spdx

from tests.unit.trust.commands import bundled, place
from tests.unit.trust.synthetic import Lifecycle, examples, model
from xray_runtime.kernel.config.sources import SourceTerms
from xray_runtime.kernel.evidence.statement import OutsideSource
from xray_runtime.kernel.history.reference import resolve
from xray_runtime.kernel.store.identity import file_sha256
from xray_runtime.kernel.tracking.recorder import records_directory
from xray_runtime.trust.bills import annexes
from xray_runtime.trust.bills.history import History
from xray_runtime.trust.bundle import audit_bundle, export
from xray_runtime.trust.retention import with_history

SCHEMAS = Path(__file__).parent / "openlineage"


@pytest.fixture
def bundle(bare: Path, tmp_path: Path) -> Path:
    with tarfile.open(bundled(bare, tmp_path / "bundle.tar")) as archive:
        archive.extractall(tmp_path / "bundle", filter="data")
    return tmp_path / "bundle"


def read_spdx(text: str) -> Any:
    elements = spdx.SHACLObjectSet()
    spdx.JSONLDDeserializer().read(BytesIO(text.encode()), elements)
    return elements


def test_the_spdx_document_is_one_that_its_own_model_reads(bundle: Path) -> None:
    text = (bundle / "bom.spdx.json").read_text()
    elements = read_spdx(text)
    assert elements.missing_ids == set()
    [document] = elements.foreach_type(spdx.SpdxDocument)
    [model] = document.rootElement
    assert model.name == "ppo-2"
    assert {entry.key: entry.value for entry in model.ai_metric}["win_rate"] == "0.6"
    assert [(one.algorithm.rpartition("/")[2], one.hashValue) for one in model.verifiedUsing] == [
        ("sha256", file_sha256(place(bundle, "ppo-2") / "manifest.json"))
    ]
    related = {
        (one.from_.name, one.relationshipType.rpartition("/")[2]): {end.name for end in one.to}
        for one in elements.foreach_type(spdx.Relationship)
    }
    assert related["ppo-2", "descendantOf"] == {"ppo-1", "sft", "reward"}
    assert related["ppo-2", "trainedOn"] == related["ppo-2", "testedOn"] == {"prepare"}
    assert related["reward", "trainedOn"] == {"preferences"}
    assert related["prepare", "hasInput"] == {"own.jsonl"}


@pytest.mark.parametrize(("old", "new"), [('"sha256"', '"a digest"'), ('"trainedOn"', '"trained"')])
def test_spdx_refuses_another_word(old: str, new: str, bundle: Path) -> None:
    text = (bundle / "bom.spdx.json").read_text()
    with pytest.raises(ValueError, match=re.escape(new.strip('"'))):
        read_spdx(text.replace(old, new))


def test_mlcroissant_reads_the_metadata_of_each_dataset(bundle: Path) -> None:
    found = {}
    for path in (bundle / "croissant").iterdir():
        metadata = mlcroissant.Dataset(jsonld=path).metadata
        assert metadata.issues.errors == set()
        found[metadata.name] = metadata
        for file in metadata.file_objects:
            assert file_sha256(path.parent / file.content_url) == file.sha256
    assert {name: [one.name for one in each.record_sets] for name, each in found.items()} == {
        "prepare": ["heldout", "train"],
        "preferences": ["heldout", "train"],
    }
    assert "chosen" in [field.name for field in found["preferences"].record_sets[0].fields]


def test_a_file_without_a_digest_is_one_that_mlcroissant_refuses(bundle: Path) -> None:
    path = next((bundle / "croissant").iterdir())
    metadata = json.loads(path.read_text())
    del metadata["distribution"][0]["sha256"]
    path.write_text(json.dumps(metadata))
    with pytest.raises(mlcroissant.ValidationError, match="sha256"):
        mlcroissant.Dataset(jsonld=path)


def lineage_validator(schema: str) -> jsonschema.Draft202012Validator:
    contents = [json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")]
    registry: Registry[Any] = Registry().with_resources((one["$id"], Resource.from_contents(one)) for one in contents)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator({"$ref": schema}, registry=registry, format_checker=checker)


def test_events_have_the_schema_of_openlineage(bundle: Path) -> None:
    events = [json.loads(line) for line in (bundle / "openlineage.jsonl").read_bytes().splitlines()]
    assert [(one["job"]["name"], one["eventType"]) for one in events][-4:] == [
        ("ppo-2", "START"),
        ("ppo-2", "COMPLETE"),
        ("evaluate", "START"),
        ("evaluate", "COMPLETE"),
    ]
    for event in events:
        lineage_validator(event["schemaURL"]).validate(event)
        parts = [event["job"], *event["inputs"], *event["outputs"]]
        for facet in [facet for part in parts for facet in part["facets"].values()]:
            lineage_validator(facet["_schemaURL"]).validate(facet)
    assert len({one["run"]["runId"] for one in events}) == len(events) / 2
    [trained] = [one for one in events if (one["job"]["name"], one["eventType"]) == ("reward", "COMPLETE")]
    assert {one["name"] for one in trained["inputs"]} == {"sft", "preferences"}
    with pytest.raises(jsonschema.ValidationError, match="is not a 'uuid'"):
        lineage_validator(trained["schemaURL"]).validate(trained | {"run": {"runId": "one"}})


def test_the_draft_says_what_is_known_and_marks_the_rest(bundle: Path) -> None:
    text = (bundle / "ai-act.md").read_text()
    assert "| ppo-2 | ppo |" in text
    assert "**prepare**: 10 rows in heldout, 50 rows in train." in text
    assert "evaluate: win rate over the model before 0.6" in text
    assert "(e) Energy: not measured for every stage. **TO WRITE**" in text
    # Weights that cannot be read have no number.
    assert "an unknown number of parameters" in text


def tensors(**shapes: tuple[int, ...]) -> bytes:
    return save({name: torch.zeros(shape) for name, shape in shapes.items()})


def test_the_draft_has_compute_and_energy_where_they_are_recorded(tmp_path: Path) -> None:
    life = Lifecycle(tmp_path / "run", tracking=False)
    measured = {"device_seconds": 7200.0, "energy_joules": {"processor-0": 1.8e6, "gpu-0": 5.4e6}}
    files = {"model.safetensors": tensors(a=(10, 20), b=(7,)), "config.json": b"{}"}
    life.add("base", "fresh_base", files, {}, **measured)
    life.add("sft", "sft", files | {"of": b"sft"}, {"model": "base"}, **measured)
    store, node = resolve("sft", life.output, None)
    records = records_directory(life.output, "sft", node.manifest.key)
    records.mkdir(parents=True, exist_ok=True)
    lines = [{"step": step, "metrics": {"speed/computed_tokens": 500.0}} for step in range(2)]
    (records / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = annexes.write(History(life.output, store.graph, node, with_history(store.graph, [node.sha256]))).decode()
    # 6 for each of 207 numbers and 1000 tokens; 7.2 MJ are 2 kWh.
    [row] = [line for line in text.splitlines() if line.startswith("| sft |") and "e+" in line]
    assert row.split(" | ")[2:] == ["2", "1.24e+06", "2 |"]
    assert "(e) Energy: measured above" in text


def test_the_base_of_an_adapter_takes_part_but_learns_nothing(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").write_bytes(tensors(a=(10, 20)))
    (tmp_path / "lora" / "adapter").mkdir(parents=True)
    (tmp_path / "lora" / "adapter" / "adapter_model.safetensors").write_bytes(tensors(a=(10, 2), b=(2, 20)))
    lora = {"r": 2, "lora_alpha": 4, "use_rslora": False, "use_dora": False, "target_modules": ["q_proj"]}
    config = lora | {"base_model_name_or_path": "base", "base_sha256": "0" * 64}
    (tmp_path / "lora" / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    assert annexes.flops_a_token(tmp_path / "base") == 6 * 200
    assert annexes.flops_a_token(tmp_path / "lora") == 4 * 200 + 6 * 60


def test_odd_names_stay_text_and_a_source_with_two_names_is_one(tmp_path: Path) -> None:
    life = Lifecycle(tmp_path / "run", tracking=False)
    odd = "x](http://evil) <b>*|\n# a heading " + "long" * 300
    sources = [
        OutsideSource(field="prepare.source", name=name, kind="file", digest="ef" * 32, terms=terms)
        for name, terms in {
            "a.jsonl": SourceTerms(license=odd),
            odd: SourceTerms(license=odd, origin=odd, personal_data="names, by consent"),
        }.items()
    ]
    data = {"train.arrow": examples(range(5)), "heldout.arrow": examples(range(5, 7)), "stats.json": b"{}"}
    life.add("prepare", "prepare", data, {}, outside=sources)
    life.add("base", "fresh_base", model("base") | {"config.json": b'{"architectures": null}'}, {"data": "prepare"})
    place, node = resolve("base", life.output, None)
    export(place, node, tmp_path / "bundle.tar")
    assert audit_bundle(tmp_path / "bundle.tar").broken == []
    with tarfile.open(tmp_path / "bundle.tar") as archive:
        archive.extractall(tmp_path / "bundle", filter="data")
    bom = (tmp_path / "bundle" / "bom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_7).validate_str(bom) is None
    refs = [one["bom-ref"] for one in json.loads(bom)["components"]]
    assert len(refs) == len(set(refs))
    elements = read_spdx((tmp_path / "bundle" / "bom.spdx.json").read_text())
    [source] = [one for one in elements.foreach_type(spdx.dataset_DatasetPackage) if one.name == odd]
    assert source.dataset_hasSensitivePersonalInformation.endswith("/noAssertion")
    draft = (tmp_path / "bundle" / "ai-act.md").read_text()
    assert "](http" not in draft.replace("\\]", "")
    assert "<b>" not in draft.replace("\\<", "")
    assert not re.search("^# a heading", draft, re.MULTILINE)
    assert "| base | fresh_base | lr = 0.001, seed = 0 |" in draft


def test_bills_need_statements_that_can_be_read(bare: Path, tmp_path: Path) -> None:
    (place(bare, "sft") / "attestation" / "statement.json").write_text("{}")
    with tarfile.open(bundled(bare, tmp_path / "bundle.tar")) as archive:
        assert "bom.spdx.json" not in archive.getnames()
