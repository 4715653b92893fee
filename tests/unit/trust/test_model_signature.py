"""The OpenSSF signature of a published model, as the public `model_signing` command sees it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trust.commands import place
from tests.unit.trust.tampering import flip
from xray_runtime.kernel.store.manifest import SIGNATURE


def verified(output: Path, directory: Path) -> bool:
    """Whether `model_signing verify` accepts a directory with the key of an output directory."""
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(directory)]
    command += ["--signature", str(directory / SIGNATURE), "--public_key", str(output / "keys" / "signing.pub")]
    return subprocess.run(command, capture_output=True, text=True).returncode == 0


def test_the_public_command_accepts_a_published_model_wherever_it_lies(fresh: Callable[[], Path]) -> None:
    output = fresh()
    for stage in ("ppo-2", "reward"):
        assert verified(output, place(output, stage))
    # The card of a policy was replaced by that of its evaluation.
    assert "model-index" in (place(output, "ppo-2") / "README.md").read_text()
    assert verified(output, place(output, "ppo-2").rename(output / "renamed"))
    # Datasets are no models.
    assert not (place(output, "prepare") / SIGNATURE).exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: flip(model / "model.safetensors"),
        lambda model: flip(model / "attestation" / "statement.json"),
        lambda model: (model / "manifest.json").unlink(),
        lambda model: (model / "more.bin").write_bytes(b"x"),
    ],
    ids=["weights", "statement", "file removed", "file added"],
)
def test_it_refuses_a_changed_model(change: Callable[[Path], object], fresh: Callable[[], Path]) -> None:
    output = fresh()
    change(place(output, "sft"))
    assert not verified(output, place(output, "sft"))
