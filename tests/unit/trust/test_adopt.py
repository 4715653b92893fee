"""Checkpoints from elsewhere: audited there, brought with all they came from, and sound where they arrive."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trust.commands import bundled
from tests.unit.trust.promoting import broken
from tests.unit.trust.synthetic import Lifecycle, pair_file
from xray_runtime.data.pairs import Example
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Artifact
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.kernel.store.checkpoints import load_manifest, verify
from xray_runtime.trust.adopt import checkpoint_from
from xray_runtime.trust.bundle import import_checkpoints
from xray_runtime.trust.keys import trust


def uri(output: Path) -> str:
    return f"sqlite:///{output / 'mlflow.db'}"


def directory(output: Path, stage: str) -> Path:
    return next(iter(output.glob(f"checkpoints/{stage}-*")))


def trusting(output: Path, source: Path) -> Path:
    """An output directory in which a person trusts the key of another."""
    trust(output, source / "keys" / "signing.pub")
    return output


@pytest.fixture
def forms(untouched: Path, tmp_path: Path) -> dict[str, str]:
    """How another directory's policy may be named."""
    bundle = bundled(untouched, tmp_path / "policy.tar")
    path = directory(untouched, "ppo-2")
    sha = resolve("ppo-2", untouched, None)[1].sha256
    return {
        "directory": str(path),
        "stage": f"{untouched}#ppo-2",
        "digest": f"{untouched}#{sha[:8]}",
        "bundle": str(bundle),
        "in a bundle": f"{bundle}#ppo-2",
    }


@pytest.mark.parametrize(
    "form",
    ["directory", "bundle", *(pytest.param(f, marks=pytest.mark.long) for f in ("stage", "digest", "in a bundle"))],
)
def test_it_comes_with_all_it_came_from(form: str, forms: dict[str, str], untouched: Path, tmp_path: Path) -> None:
    output = trusting(tmp_path / "run", untouched)
    ref = checkpoint_from(forms[form], output, uri(output))
    assert (ref.stage, ref.kind, ref.type, ref.path.parent) == ("ppo-2", "ppo", "Model", output / "checkpoints")
    assert ref.mlflow_model_id is not None
    assert broken(output) == []
    # Its evaluation comes too, which signs the card beside the weights; again nothing is brought or recorded.
    assert len(open_lineage_store(output, None).graph.nodes) == 8
    before = sorted(output.glob("checkpoints/*"))
    assert checkpoint_from(forms[form], output, uri(output)) == ref
    assert (sorted(output.glob("checkpoints/*")), broken(output)) == (before, [])
    # What is made of it here goes on behind it.
    life = Lifecycle(output)
    life.done = {"policy": ref, "data": checkpoint_from("prepare", output, uri(output))}
    life.add("more", "sft", {"model.safetensors": b"x"}, {"base": "policy", "data": "data"})
    assert broken(output) == []
    assert not list((output / "checkpoints").glob("*building*"))


def test_it_is_in_both_directories(fresh: Callable[[], Path], tmp_path: Path) -> None:
    source = fresh()
    output = trusting(tmp_path / "run-2", source)
    ref = checkpoint_from(f"{source}#sft", output, None)
    assert ref.mlflow_model_id is None
    assert {p.name.rpartition("-")[0] for p in (output / "checkpoints").iterdir()} == {"sft", "base", "prepare"}
    shutil.rmtree(source)
    assert verify(ref.path, ref.sha256) == []


def test_a_plain_reference_is_of_this_directory(fresh: Callable[[], Path]) -> None:
    output = fresh()
    ref = checkpoint_from("sft", output, uri(output))
    assert ref.path == directory(output, "sft")
    (ref.path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"'sft' differs from what was published: config\.json was changed"):
        checkpoint_from("sft", output, uri(output))
    with pytest.raises(ConfigError, match="'nothing' matches nothing in"):
        checkpoint_from("nothing", output, uri(output))


def test_an_unsound_checkpoint_is_not_adopted(fresh: Callable[[], Path], tmp_path: Path) -> None:
    source = fresh()
    output = trusting(tmp_path / "run-2", source)
    weights = directory(source, "base") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(ConfigError, match=r"#ppo-2' is not sound: the audit there found file-changed \(base"):
        checkpoint_from(f"{source}#ppo-2", output, uri(output))
    bundle = bundled(source, tmp_path / "policy.tar")
    with pytest.raises(ConfigError, match="is not sound"):
        checkpoint_from(str(bundle), output, uri(output))
    assert list((output / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("ref", ["{other}#nothing", "{bundle}#nothing", "/nowhere#sft", "{other}", "no.tar#sft", "#"])
def test_an_unknown_reference_is_one_line(ref: str, untouched: Path, tmp_path: Path) -> None:
    ref = ref.replace("{other}", str(untouched)).replace("{bundle}", str(bundled(untouched, tmp_path / "b.tar")))
    with pytest.raises(ConfigError) as error:
        checkpoint_from(ref, tmp_path / "run", None)
    assert len(str(error.value).splitlines()) == 1


def test_a_bundle_with_several_ends_must_be_told_which(tmp_path: Path) -> None:
    source = tmp_path / "source"
    life = Lifecycle(source, tracking=False).whole()
    life.add("other", "sft", {"model.safetensors": b"other"}, {"base": "base", "data": "prepare"})
    path = tmp_path / "b.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("checkpoints", "keys/signing.pub", "log.jsonl", "log.checkpoint"):
            archive.add(source / name, name)
    trusting(tmp_path / "a", source)
    assert checkpoint_from(f"{path}#other", tmp_path / "a", None).stage == "other"
    with pytest.raises(
        ConfigError, match=r"ends in 2 checkpoints \(other-\w+, ppo-2-\w+\): choose one as .*b\.tar#REF"
    ):
        checkpoint_from(str(path), tmp_path / "a", None)


def test_another_checkpoint_under_the_same_key_is_not_mixed_in(fresh: Callable[[], Path], tmp_path: Path) -> None:
    source = fresh()
    output = trusting(tmp_path / "run-2", source)
    life = Lifecycle(output, tracking=False)
    own = load_manifest(directory(source, "prepare"))
    life.add(
        "prepare", "prepare", {"train.arrow": pair_file(Example), "heldout.arrow": pair_file(Example)}, {}, own.config
    )
    with pytest.raises(ConfigError, match=r"holds a different checkpoint with the same key as .*: move one"):
        checkpoint_from(f"{source}#sft", output, None)


def test_a_link_is_not_read_through_where_it_is_brought(fresh: Callable[[], Path], tmp_path: Path) -> None:
    """As it may have come after the audit there."""
    source, elsewhere = fresh(), tmp_path / "elsewhere"
    output = trusting(tmp_path / "run-2", source)
    elsewhere.mkdir()
    (elsewhere / "secret").write_text("not of this checkpoint")
    (directory(source, "base") / "more").symlink_to(elsewhere)
    place, node = resolve("base", source, None)
    import_checkpoints(place, place.graph.ancestors([node.sha256]), output, tracking_uri=None, experiment="")
    assert (directory(output, "base") / "more").readlink() == elsewhere
    assert [text.split()[0] for text in broken(output)] == ["file-added"]


class Sketch(Artifact):
    """A type that only this test knows, and registers nowhere."""


def test_unknown_types_and_kinds_get_the_common_checks(fresh: Callable[[], Path]) -> None:
    life = Lifecycle.resumed(fresh())
    life.add("sketch", "draw", {"stats.json": b'{"pairs": 3}'}, {"of": "ppo-2"}, type="Sketch")
    assert broken(life.output) == []
    node = resolve("sketch", life.output, None)[1]
    assert (node.kind, node.sides, node.results) == (None, (), {"pairs": 3})
    assert checkpoint_from("sketch", life.output, None).type == "Sketch"
    (node.directory / "stats.json").write_text("{}")
    assert [text.split()[0] for text in broken(life.output)] == ["file-changed"]
