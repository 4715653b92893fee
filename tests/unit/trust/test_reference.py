"""The history of one checkpoint is read from its own manifests; where the log cannot tell, all are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.message_texts import Messages
from tests.unit.trust.synthetic import Lifecycle, model
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history import reference
from xray_runtime.kernel.history.reference import resolve, resolve_history
from xray_runtime.kernel.history.render import lineage_text


@pytest.fixture
def life(tmp_path: Path) -> Lifecycle:
    made = Lifecycle(tmp_path / "run", tracking=False)
    made.data_and_sft()
    made.add("other", "sft", model("other"), {"base": "base", "data": "prepare"})
    return made


@pytest.mark.parametrize("named", ["stage", "sha256", "start", "name", "directory"])
def test_it_says_what_the_whole_graph_says_and_holds_the_ancestors_alone(named: str, life: Lifecycle) -> None:
    ref = life.done["sft"]
    names = {"stage": "sft", "sha256": ref.sha256, "start": ref.sha256[:8], "name": ref.path.name}
    text = names.get(named, str(ref.path))
    place, node = resolve_history(text, life.output, None)
    whole, same = resolve(text, life.output, None)
    assert {n.manifest.stage for n in place.graph.nodes.values()} == {"prepare", "base", "sft"}
    assert "other" in {n.manifest.stage for n in whole.graph.nodes.values()}
    assert node.sha256 == same.sha256 == ref.sha256
    assert list(lineage_text(place.graph, node, False)) == list(lineage_text(whole.graph, same, False))
    assert (place.output, place.tracking_uri) == (whole.output, whole.tracking_uri)


def test_all_manifests_are_read_where_the_log_differs_from_the_store(
    life: Lifecycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()
    graph_of = reference.read_graph
    monkeypatch.setattr(reference, "read_graph", lambda store: (read.append(store.name), graph_of(store))[1])
    resolve_history("sft", life.output, None)
    assert read == []
    other = life.done["other"].path
    shutil.copytree(other, other.with_name("other-copied"))
    _, node = resolve_history("sft", life.output, None)
    assert read == ["checkpoints"]
    assert node.sha256 == life.done["sft"].sha256


def test_a_manifest_that_is_not_the_logged_one_does_not_count(life: Lifecycle) -> None:
    sft, other = life.done["sft"], life.done["other"]
    shutil.copy(other.path / "manifest.json", sft.path / "manifest.json")
    with pytest.raises(ConfigError, match="matches nothing"):
        resolve_history(sft.path.name, life.output, None)


def test_a_stage_that_ran_with_two_settings_names_two(life: Lifecycle, message_texts: Messages) -> None:
    life.add("sft", "sft", model("longer"), {"base": "base", "data": "prepare"}, {"epochs": 2})
    with message_texts.raises(ConfigError):
        resolve("sft", life.output, None)
