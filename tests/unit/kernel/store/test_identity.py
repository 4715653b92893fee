"""What makes two computations the same: one text of every value, and nothing of an identity that a key leaves out."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xray_runtime.kernel.store.identity import Identity, canonical, code_digest, digest, file_sha256
from xray_runtime.kernel.store.manifest import FileEntry, Manifest

IDENTITY = Identity(
    stage="sft",
    kind="sft",
    config={"lr": 1e-3, "name": "ä"},
    seed=0,
    parents={"base": "cd" * 32},
    functions={"gold": {"module": "ab" * 32}},
    code={"a": "01" * 32, "b": "02" * 32},
    versions={"torch": "2"},
)


def test_one_value_has_one_text() -> None:
    assert canonical({"b": [1, 2.5], "a": "ä"}) == '{"a":"ä","b":[1,2.5]}'.encode()
    assert canonical({"a": "ä", "b": [1, 2.5]}) == canonical({"b": [1, 2.5], "a": "ä"})
    assert digest([]) == hashlib.sha256(b"[]").hexdigest()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_have_no_digest(number: float) -> None:
    """NaN differs from itself: two computations with it would be the same and not the same."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest({"lr": number})


OTHERS: dict[str, Any] = {
    "stage": "sft-2",
    "kind": "dpo",
    "config": {"lr": 2e-3, "name": "ä"},
    "seed": 1,
    "parents": {"base": "ce" * 32},
    "functions": {"gold": {"module": "ac" * 32}},
    "code": {"a": "01" * 32, "b": "03" * 32},
    "versions": {"torch": "3"},
}


@pytest.mark.parametrize("field", Identity.model_fields)
def test_a_key_holds_every_field_of_an_identity(field: str) -> None:
    other = IDENTITY.model_copy(update={field: OTHERS[field]})
    assert other.key != IDENTITY.key
    # Order is none of it.
    turned = {field: dict(reversed(v.items())) if isinstance(v, dict) else v for field, v in vars(IDENTITY).items()}
    assert Identity(**turned).key == IDENTITY.key


def test_code_is_its_modules_and_the_python_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_digest(IDENTITY.code)
    assert code_digest(dict(reversed(IDENTITY.code.items()))) == before
    assert code_digest({"a": "02" * 32, "b": "01" * 32}) != before
    now = sys.version_info
    for version in ((now.major, now.minor + 1), (now.major + 1, now.minor)):
        monkeypatch.setattr(sys, "version_info", SimpleNamespace(major=version[0], minor=version[1]))
        assert code_digest(IDENTITY.code) != before


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(content)
    assert file_sha256(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def manifest(**fields: Any) -> Manifest:
    entry = FileEntry(path="model.bin", sha256="ef" * 32, size=3)
    given = vars(IDENTITY) | {"type": "Model", "key": IDENTITY.key, "step": 1, "dataset": None, "files": [entry]}
    return Manifest(**{**given, **fields})


def test_a_manifest_has_one_text_and_gives_back_its_identity() -> None:
    text = manifest().to_bytes()
    assert Manifest.model_validate_json(text) == manifest()
    assert Manifest.model_validate_json(text).identity == IDENTITY
    turned = manifest(config=dict(reversed(IDENTITY.config.items())), code=dict(reversed(IDENTITY.code.items())))
    assert turned.to_bytes() == text
    # As people read it, in lines and in their letters.
    content = json.loads(text)
    assert text.decode() == json.dumps(content, sort_keys=True, indent=2, ensure_ascii=False) + "\n"
    assert manifest().config_digest == digest(IDENTITY.config)
    assert manifest().code_digest == code_digest(IDENTITY.code)


def test_a_manifest_with_nan_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        manifest(config={"x": [math.nan]}).to_bytes()


@pytest.mark.parametrize("wrong", ["", "0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n", "x" + "0" * 64])
def test_a_digest_is_64_digits(wrong: str) -> None:
    with pytest.raises(ValueError, match="key"):
        manifest(key=wrong)
