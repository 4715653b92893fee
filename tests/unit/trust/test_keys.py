"""A new key takes over: what was signed before stays good, and nobody else's signature becomes so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trust.commands import xray
from tests.unit.trust.synthetic import Lifecycle, decided
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history.reference import open_lineage_store, resolve
from xray_runtime.trust.audit.checkpoints import audit
from xray_runtime.trust.bundle import audit_bundle, export, import_bundle
from xray_runtime.trust.keys import NEXT, read_rotations, rotate, trusted_keys
from xray_runtime.trust.signing import KEY_VARIABLE, make_key, public_bytes, signing_key


def codes(output: Path, public: Path | None = None) -> set[str]:
    return {f.code for f in audit(open_lineage_store(output, None), public=public).findings if f.is_broken}


def copy_of_key(output: Path, name: str) -> Path:
    return Path(shutil.copy(output / "keys" / "signing.pub", output.parent / name))


def rotated(output: Path, **options: Path) -> None:
    rotate(output, by="a person", note="a year is over", **options)


def test_old_and_new_records_verify_from_either_key(fresh: Callable[[], Path]) -> None:
    output = fresh()
    first = copy_of_key(output, "first.pub")
    old = (output / "keys" / "signing.pem").read_bytes()
    rotated(output)
    second = copy_of_key(output, "second.pub")
    rotated(output)
    assert old not in [path.read_bytes() for path in (output / "keys").rglob("*") if path.is_file()]
    lifecycle = Lifecycle.resumed(output)
    lifecycle.add("ppo-3", "ppo", {"model.safetensors": b"3"}, {"policy": "ppo-2", "prompts": "prepare"})
    assert codes(output) == set()
    assert [key.until is None for key in trusted_keys(output)].count(True) == 1
    for public in (first, second, output / "keys" / "signing.pub"):
        assert codes(output, public) == set()
    chain = decided(output)
    assert [d["action"] for d in chain] == ["register", "rotate", "rotate"]


def test_the_command(fresh: Callable[[], Path]) -> None:
    output = fresh()
    done = xray("keys", "rotate", "--output", output, "--note", "a year is over")
    assert done.exit_code == 0, done.output
    shown = xray("keys", "show", "--output", output).output.splitlines()
    assert sorted(line.split()[1] for line in shown) == ["retired", "signs"]
    assert xray("audit", "--all", "--output", output).exit_code == 0


def test_a_rotation_cut_short_is_finished_by_the_next(
    fresh: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = fresh()
    replace = os.replace

    def cut(source: Path, target: Path) -> None:
        if Path(target).name == "signing.pem":
            raise OSError("the power went")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", cut)
        with pytest.raises(OSError, match="the power went"):
            rotated(output)
    with pytest.raises(ConfigError, match="is not the key"):
        signing_key(output)
    rotated(output)
    signing_key(output)
    assert not (output / "keys" / NEXT).exists()
    assert len(read_rotations(output)[0]) == 1
    assert codes(output) == set()


def test_a_key_kept_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_key(tmp_path / "old.pem")
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "old.pem"))
    output = tmp_path / "run"
    Lifecycle(output).whole()
    with pytest.raises(ConfigError, match="--new-key: is required"):
        rotated(output)
    (tmp_path / "none.pem").write_text("none")
    for directory in (output, tmp_path / "without a key"):
        with pytest.raises(ConfigError, match=r"^--new-key: .*none\.pem' cannot be used: must be an ECDSA key"):
            rotated(directory, new_key=tmp_path / "none.pem")
    rotated(output, new_key=tmp_path / "new.pem")
    with pytest.raises(ConfigError, match="is not the key"):
        signing_key(output)
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "new.pem"))
    assert signing_key(output) == tmp_path / "new.pem"
    assert (output / "keys" / "signing.pub").read_bytes() == public_bytes(tmp_path / "new.pem")
    assert codes(output) == set()


def test_a_thief_of_a_retired_key_cannot_name_a_new_one(fresh: Callable[[str], Path]) -> None:
    output, thief = fresh("run"), fresh("thief")
    rotated(output)
    # The thief has the old key, and has another take over from it.
    rotated(thief)
    shutil.copytree(thief / "keys" / "retired", output / "keys" / "retired", dirs_exist_ok=True)
    found = audit(open_lineage_store(output, None)).findings
    assert {f.code for f in found if f.is_broken} == {
        *("rotation-broken", "signature-foreign", "log-broken"),
        # A log without a valid signature counts for nothing: it explains neither files nor rows of MLflow's.
        *("log-shorter", "file-unsigned", "run-unsigned", "alias-moved"),
        *("mlflow-model-changed", "mlflow-run-changed", "registry-unexplained"),
    }
    assert len(trusted_keys(output)) == 1


def test_a_bundle_takes_retired_keys_along(fresh: Callable[[], Path], tmp_path: Path) -> None:
    output = fresh()
    rotated(output)
    place, node = resolve("ppo-2", output, None)
    export(place, node, tmp_path / "policy.tar")
    assert audit_bundle(tmp_path / "policy.tar").is_sound
    assert audit_bundle(tmp_path / "policy.tar", output / "keys" / "signing.pub").is_sound
    other = tmp_path / "other"
    uri = f"sqlite:///{other / 'mlflow.db'}"
    public = output / "keys" / "signing.pub"
    assert import_bundle(tmp_path / "policy.tar", other, tracking_uri=uri, experiment="x", public=public).is_sound
    assert codes(other) == set()
