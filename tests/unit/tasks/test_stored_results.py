"""Results of stages by key: found again here and on other machines, every byte verified, nothing else taken for one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.unit.kernel.store.published import IDENTITY, KEY
from xray.tasks.spec import StageResult
from xray.tasks.stored_results import RESULTS, find_result, keep_result
from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, Store
from xray_runtime.kernel.store.shared import SharedStore, StorageError
from xray_runtime.kernel.tracking.recorder import records_directory
from xray_runtime.trust.log import log_files
from xray_runtime.trust.signing import make_key, signing_key

FILE = f"sft-{KEY[:12]}.json"


def store_of(output: Path, shared: Path | None) -> Store:
    return Store(output / CHECKPOINTS, None if shared is None else SharedStore(shared.as_uri()))


def computed(output: Path, shared: Path | None, content: bytes = b"weights") -> StageResult:
    """A stage that has just run: its checkpoint is published, its records lie there, its result is kept."""
    store = store_of(output, shared)
    with store.building("sft", KEY) as built:
        (built / "model.bin").write_bytes(content)
        checkpoint = store.publish(built, IDENTITY, type="Model", step=3, dataset="ab" * 32)
    records = records_directory(output, "sft", KEY)
    records.mkdir(parents=True, exist_ok=True)
    (records / "metrics.jsonl").write_text('{"step": 0}\n')
    result = StageResult(
        name="sft",
        kind="sft",
        key=KEY,
        checkpoint=checkpoint.model_copy(update={"mlflow_model_id": "m-1"}),
        parents=IDENTITY.parents,
        dataset="ab" * 32,
        mlflow_run_id="run-1",
        seconds=1.5,
        attempts=2,
    )
    keep_result(result, output, store)
    return result


@pytest.fixture(autouse=True)
def one_key(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """All machines of a test sign with one key, as those that share a store must."""
    private = tmp_path_factory.mktemp("key") / "signing.pem"
    make_key(private)
    monkeypatch.setenv("XRAY_SIGNING_KEY", str(private))


@pytest.fixture(params=["alone", "shared"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """The directory of a shared store, or none."""
    return tmp_path / "shared" if request.param == "shared" else None


def found(output: Path, shared: Path | None, key: str = KEY, name: str = "sft") -> StageResult | None:
    signing_key(output)
    return find_result(name, key, output, store_of(output, shared))


def test_a_stored_result_is_found(shared: Path | None, tmp_path: Path) -> None:
    result = computed(tmp_path / "out", shared)
    assert not result.cached
    again = found(tmp_path / "out", shared)
    assert again == result.model_copy(update={"attempts": 0})
    assert again is not None
    assert again.cached
    assert again.checkpoint.mlflow_model_id == "m-1"


def test_a_result_never_stored_is_not_found(shared: Path | None, tmp_path: Path) -> None:
    assert found(tmp_path / "out", shared) is None
    computed(tmp_path / "out", shared)
    assert found(tmp_path / "out", shared, key="0" * 64) is None
    assert found(tmp_path / "out", shared, name="base") is None


def test_another_machine_finds_it_in_the_shared_store(tmp_path: Path) -> None:
    there = computed(tmp_path / "there", tmp_path / "shared")
    here = found(tmp_path / "here", tmp_path / "shared")
    assert here is not None
    place = tmp_path / "here" / CHECKPOINTS / there.checkpoint.path.name
    assert here.checkpoint == there.checkpoint.model_copy(update={"uri": str(place)})
    assert (place / "model.bin").read_bytes() == b"weights"
    assert (records_directory(tmp_path / "here", "sft", KEY) / "metrics.jsonl").read_text() == '{"step": 0}\n'
    # Without the store it is nowhere.
    assert found(tmp_path / "elsewhere", None) is None


def test_a_machine_that_found_it_keeps_it(tmp_path: Path) -> None:
    computed(tmp_path / "there", tmp_path / "shared")
    here = found(tmp_path / "here", tmp_path / "shared")
    assert here is not None
    keep_result(
        here.model_copy(update={"mlflow_run_id": "run-2"}), tmp_path / "here", store_of(tmp_path / "here", None)
    )
    alone = found(tmp_path / "here", None)
    assert alone is not None
    assert alone.mlflow_run_id == "run-2"


def test_local_results_are_shared_once_there_is_a_store(tmp_path: Path) -> None:
    computed(tmp_path / "out", None)
    store = store_of(tmp_path / "out", tmp_path / "shared")
    result = find_result("sft", KEY, tmp_path / "out", store)
    assert result is not None
    assert found(tmp_path / "other", tmp_path / "shared") is None
    keep_result(result, tmp_path / "out", store)
    assert found(tmp_path / "other", tmp_path / "shared") is not None


def test_the_first_result_in_the_shared_store_stays(tmp_path: Path) -> None:
    computed(tmp_path / "there", tmp_path / "shared")
    content = (tmp_path / "shared" / RESULTS / FILE).read_bytes()
    result = computed(tmp_path / "here", tmp_path / "shared")
    keep_result(
        result.model_copy(update={"seconds": 99.0}), tmp_path / "here", store_of(tmp_path / "here", tmp_path / "shared")
    )
    assert (tmp_path / "shared" / RESULTS / FILE).read_bytes() == content


def test_damage_is_no_result(shared: Path | None, tmp_path: Path) -> None:
    result = computed(tmp_path / "out", shared)
    (result.checkpoint.path / "model.bin").write_bytes(b"weighty")
    again = found(tmp_path / "out", shared)
    if shared is None:
        assert again is None
        return
    # A sound copy lies in the store.
    assert again is not None
    assert (again.checkpoint.path / "model.bin").read_bytes() == b"weights"


def test_damage_in_the_store_is_not_fetched(tmp_path: Path) -> None:
    computed(tmp_path / "there", tmp_path / "shared")
    [content] = [p for p in (tmp_path / "shared").rglob("*") if p.is_file() and p.read_bytes() == b"weights"]
    content.write_bytes(b"weighty")
    assert found(tmp_path / "here", tmp_path / "shared") is None
    assert not list((tmp_path / "here" / CHECKPOINTS).iterdir())


def test_a_report_without_curves_is_better_than_no_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    computed(tmp_path / "there", tmp_path / "shared")
    [content] = [p for p in (tmp_path / "shared").rglob("*") if p.is_file() and p.read_bytes() == b'{"step": 0}\n']
    content.write_bytes(b'{"step": 9}\n')
    assert found(tmp_path / "here", tmp_path / "shared") is not None
    assert not records_directory(tmp_path / "here", "sft", KEY).exists()
    assert "the report lacks its curves" in caplog.text
    # Nothing half fetched is left.
    assert not list(records_directory(tmp_path / "here", "sft", KEY).parent.iterdir())


def test_records_that_are_here_stay(tmp_path: Path) -> None:
    computed(tmp_path / "out", tmp_path / "shared")
    metrics = records_directory(tmp_path / "out", "sft", KEY) / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    assert found(tmp_path / "out", tmp_path / "shared") is not None
    assert metrics.read_text() == '{"step": 1}\n'


def test_a_checkpoint_kept_elsewhere_with_other_bytes_is_not_in_this_mlflow(tmp_path: Path) -> None:
    """Two machines computed one key to different bytes: each keeps its own, and MLflow's model is of the other."""
    computed(tmp_path / "out", None, b"one")
    path = tmp_path / "out" / RESULTS / FILE
    record = json.loads(path.read_text())
    record["checkpoint"]["sha256"] = "99" * 32
    path.write_text(json.dumps(record))
    signed(path)
    result = found(tmp_path / "out", None)
    assert result is not None
    assert result.checkpoint.mlflow_model_id is None
    assert result.checkpoint.sha256 != "99" * 32


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "{}", '{"name": "sft"}', "\x00\xff", "[" * 10_000, '{"__class__": "os.system"}']
)
def test_invalid_results_are_not_used(
    content: str, shared: Path | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    computed(tmp_path / "out", shared)
    path = tmp_path / "out" / RESULTS / FILE
    path.write_bytes(content.encode("latin-1"))
    signed(path)
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path / "out", shared) is None
    assert "not the result of a stage; it is not used" in caplog.text


@pytest.mark.parametrize("change", [{"key": "0" * 64}, {"name": "base"}])
def test_the_result_of_another_stage_is_not_used(change: dict[str, Any], shared: Path | None, tmp_path: Path) -> None:
    computed(tmp_path / "out", shared)
    path = tmp_path / "out" / RESULTS / FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    signed(path)
    assert found(tmp_path / "out", shared) is None


def test_a_changed_result_is_not_used(shared: Path | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = computed(tmp_path / "out", shared)
    path = tmp_path / "out" / RESULTS / FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 0.1}))
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path / "out", shared) is None
    assert "not what was signed" in caplog.text
    # The stage finds its checkpoint, and says so anew.
    keep_result(result, tmp_path / "out", store_of(tmp_path / "out", shared))
    assert found(tmp_path / "out", shared) is not None


def signed(path: Path) -> None:
    """As if X-ray had written it."""
    output = path.parent.parent
    log_files(output, [path], "results")


def test_an_unwritable_store_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = computed(tmp_path / "out", None)
    store = store_of(tmp_path / "out", tmp_path / "shared")

    def away(*_: Any) -> Any:
        raise StorageError("away")

    monkeypatch.setattr(SharedStore, "put", away)
    with pytest.raises(StorageError):
        keep_result(result, tmp_path / "out", store)
    # It is kept here all the same, and the next run brings it there.
    assert found(tmp_path / "out", None) is not None
