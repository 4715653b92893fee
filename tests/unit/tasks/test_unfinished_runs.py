"""A run goes on where its own record says that it was interrupted; a record that says too little starts a new run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xray.tasks.output_directory import resume_point, unfinished_run
from xray_runtime.kernel.store.identity import digest

CONFIG = {"seed": 1}
INTERRUPTED = {"config_digest": digest(CONFIG), "status": "running", "run_id": "a1", "stages": [{"name": "sft"}]}


def written(directory: Path, content: Any) -> Path:
    (directory / "lifecycle.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def test_an_interrupted_run_of_the_same_config_goes_on(tmp_path: Path) -> None:
    assert unfinished_run(written(tmp_path, INTERRUPTED), tmp_path, CONFIG) == INTERRUPTED
    assert resume_point(tmp_path) == "the end of sft"
    assert unfinished_run(tmp_path, tmp_path, {"seed": 2}) is None


@pytest.mark.parametrize("field", ["config_digest", "status", "run_id"])
def test_a_record_that_lacks_a_field_starts_a_new_run(tmp_path: Path, field: str) -> None:
    content = {name: value for name, value in INTERRUPTED.items() if name != field}
    assert unfinished_run(written(tmp_path, content), tmp_path, CONFIG) is None


@pytest.mark.parametrize("content", [[], "text", {}])
def test_a_damaged_record_is_not_used(tmp_path: Path, content: Any) -> None:
    assert unfinished_run(written(tmp_path, content), tmp_path, CONFIG) is None
    assert resume_point(tmp_path) == "the beginning"
