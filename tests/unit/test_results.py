"""Results of stages are plain JSON: what else lies in their place is not decoded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from prefect.filesystems import LocalFileSystem
from prefect.results import ResultStore
from prefect.serializers import JSONSerializer, PickleSerializer

from xray.tasks.results import PLAIN, PlainResults
from xray.tasks.stage import stage

RESULT = {"name": "sft", "parents": {}, "dataset": None, "seconds": 1.5}


class Intruder:
    """Unpickled, it makes a directory."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.place),)


def store(folder: Path, serializer: Any = PLAIN, storage: Any = PlainResults) -> ResultStore:
    return ResultStore(result_storage=storage(basepath=str(folder)), serializer=serializer)


def test_a_result_comes_back(tmp_path: Path) -> None:
    store(tmp_path).write(RESULT, key="key")
    assert store(tmp_path).exists("key")
    assert store(tmp_path).read("key").result == RESULT
    assert not store(tmp_path).exists("another")


def test_a_pickle_in_its_place_is_not_opened(tmp_path: Path) -> None:
    hurt = tmp_path / "hurt"
    store(tmp_path, PickleSerializer()).write(Intruder(hurt), key="key")
    assert not store(tmp_path).exists("key")
    with pytest.raises(ValueError, match="not a result of ours"):
        store(tmp_path).read("key")
    assert not hurt.exists()
    # Prefect's own storage would have.
    store(tmp_path, storage=LocalFileSystem).exists("key")
    assert hurt.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"object_decoder": "os.mkdir"},
        {"jsonlib": "cloudpickle"},
        {"loads_kwargs": {"object_hook": "os.mkdir"}},
        {"type": "compressed"},
        {"type": "unheard-of"},
    ],
)
def test_nothing_in_a_file_chooses_what_decodes_it(change: dict[str, Any], tmp_path: Path) -> None:
    store(tmp_path).write(RESULT, key="key")
    record = json.loads((tmp_path / "key").read_text())
    record["metadata"]["serializer"] |= change
    (tmp_path / "key").write_text(json.dumps(record))
    assert not store(tmp_path).exists("key")


@pytest.mark.parametrize("content", ["", "[]", "null", "{", '{"metadata": 1, "result": 2}', "[" * 100_000])
def test_damaged_files_are_no_results(content: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(content)
    assert not store(tmp_path).exists("key")


def test_prefects_own_json_would_import_what_a_text_names(tmp_path: Path) -> None:
    text = {"__class__": "tests.unit.test_results.Intruder", "data": {}}
    store(tmp_path).write(text, key="key")
    assert store(tmp_path).read("key").result == text
    with pytest.raises(Exception, match="Intruder"):
        JSONSerializer().loads(json.dumps(text).encode())


def test_options_are_made_before_storage_is_set(tmp_path: Path) -> None:
    """Why the flow sets it on a copy."""
    configured = stage.with_options(retries=1)
    copy = configured.with_options()
    copy.result_storage = PlainResults(basepath=str(tmp_path))
    assert configured.with_options(refresh_cache=True).refresh_cache
    with pytest.raises(TypeError, match="persisted server-side"):
        copy.with_options(refresh_cache=True)


def test_it_travels_with_the_task(tmp_path: Path) -> None:
    configured = stage.with_options(retries=1)
    configured.result_storage = PlainResults(basepath=str(tmp_path))
    there = cloudpickle.loads(cloudpickle.dumps(configured))
    assert isinstance(there.result_storage, PlainResults)
    assert there.result_storage.basepath == str(tmp_path)
    assert there.result_serializer == PLAIN
