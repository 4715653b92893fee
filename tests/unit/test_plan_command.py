"""`xray plan`: its JSON, its table, and bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from xray.cli.main import app

ROOT = Path(__file__).parents[2]


def xray_plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def planned(*arguments: str) -> dict[str, Any]:
    outcome = xray_plan(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.output
    content: dict[str, Any] = json.loads(outcome.stdout)
    return content


PAPER = ("--params", "7.5e9", "--devices", "64", "--memory-gib", "80")


def test_the_json_contract() -> None:
    content = planned(*PAPER)
    assert content["fits"] is True
    assert content["placement"] == "separate"
    assert {k: round(v, 1) for k, v in content["model_state_gb"].items()} == {
        "0": 120.0,
        "1": 31.4,
        "2": 16.6,
        "3": 1.9,
    }
    roles = {"policy", "reference", "critic", "reward", "generator"}
    assert content["layout"].keys() == content["memory_gb"].keys() == content["breakdown_gb"].keys() == roles
    for name, layout in content["layout"].items():
        assert layout.keys() == {"zero_stage", "tp", "pp", "dp", "checkpointing", "devices"}
        first, last = layout["devices"]
        assert last - first + 1 == layout["tp"] * layout["pp"] * layout["dp"]
        assert content["memory_gb"][name] == pytest.approx(sum(content["breakdown_gb"][name].values()), abs=1e-3)
        assert content["memory_gb"][name] <= content["usable_gb"] == pytest.approx(0.9 * 80 * 1.073741824, abs=1e-3)
    assert content["peak_gb"] == max(content["memory_gb"].values())
    assert content["limits"] == ["devices 0–17 need 65.1 of 77.3 usable GB, most of it policy's activations (27.5 GB)"]
    assert content["reasons"] == ["colocated: needs 102 GB a device, 77.3 GB are usable"]
    assert content["suggestions"] == []


def test_where_nothing_fits_the_options_of_the_command_are_suggested() -> None:
    """Each suggestion can be given to the same command, which then has a plan."""
    content = planned("--params", "7e9", "--devices", "4", "--memory-gib", "80")
    assert content["fits"] is False
    assert content["peak_gb"] > content["usable_gb"]
    by_change = {s["change"]: s["value"] for s in content["suggestions"]}
    assert planned("--params", "7e9", "--devices", str(by_change["num_devices"]), "--memory-gib", "80")["fits"]
    assert planned("--params", "7e9", "--devices", "4", "--memory-gib", str(by_change["memory_gib"]))["fits"]
    same = ("--params", "7e9", "--devices", "4", "--memory-gib", "80")
    assert planned(*same, "--lora-rank", str(by_change["lora_rank"]))["fits"]
    assert planned(*same, "--offload")["fits"]


@pytest.mark.parametrize("preset", sorted(p.name for p in (ROOT / "configs").glob("*.yaml") if p.stem != "custom"))
def test_every_preset_that_needs_no_hub_has_a_plan_here(preset: str) -> None:
    content = planned(str(ROOT / "configs" / preset))
    assert content["num_devices"] >= 1
    assert content["placement"] in ("colocated", "separate", "tensor-parallel generator")


def test_how_models_are_trained_shows() -> None:
    options = "{zero_stage: 3, precision: bfloat16, offload: nvme, nvme_path: /nvme, activation_checkpointing: true}"
    asked = (
        str(ROOT / "configs" / "tiny.yaml"),
        "--devices",
        "2",
        "--memory-gib",
        "80",
        "--set",
        "runtime.device=cuda",
    )
    asked += ("--set", f"ppo.stages.0.engine={options}", "--set", f"ppo.stages.1.engine={options}")
    asked += ("--set", "ppo.stages.0.lora.rank=8", "--set", "ppo.stages.1.lora.rank=4")
    content = planned(*asked)
    # The larger of two ranks; in one column where a person looks.
    assert content["training"] == {"policy": {"weight_bytes": 2, "lora_rank": 8, "offload": True}}
    assert (content["layout"]["policy"]["zero_stage"], content["layout"]["policy"]["checkpointing"]) == (3, True)
    assert content["breakdown_gb"]["policy"]["optimizer"] == 0
    assert "ZeRO-3 DP2 bf16 LoRA 8 offload recompute" in xray_plan(*asked).stdout


def test_people_see_a_table_and_reasons() -> None:
    outcome = xray_plan("--params", "70e9", "--devices", "8", "--memory-gib", "80")
    assert outcome.exit_code == 0
    for words in (
        "nothing fits; nearest: tensor-parallel generator",
        "recompute",
        "limit",
        "would fit with  64 devices",
    ):
        assert words in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "CONFIG, --params: neither is given, must be one of them"),
        (["configs/tiny.yaml", "--params", "1e9"], "CONFIG, --params: both are given, must be one of them"),
        (["--params", "many"], '--params: "many" is not allowed: must be a number from 1e+06 to 1e+13'),
        (["--params", "-7e9"], "--params: -7e9 is not allowed: must be a number from 1e+06 to 1e+13"),
        (["--params", "inf"], "--params: inf is not allowed: must be a number from"),
        (["--params", "1e9", "--devices", "0"], "--devices: 0 is not allowed: must be a whole number from 1 to 65536"),
        (["--params", "1e9", "--devices", "1.5"], "--devices: 1.5 is not allowed: must be a whole number from 1"),
        (["--params", "1e9", "--memory-gib", "0"], "--memory-gib: 0 is not allowed: must be a number from 0.0625"),
        (["--params", "1e9", "--memory-gib", "nan"], '--memory-gib: "nan" is not allowed: must be a number from'),
        (["--params", "1e9", "--sequence-tokens", "1"], "--sequence-tokens: 1 is not allowed: must be a whole number"),
        (["--params", "1e9", "--lora-rank", "0"], "--lora-rank: 0 is not allowed: must be a whole number from 1 to"),
        (["--params", "1e9", "--set", "seed=1"], '--set: "seed=1" is not allowed: must be given with a CONFIG'),
        (["configs/tiny.yaml", "--sequence-tokens", "9"], "--sequence-tokens: 9 is not allowed: must be given with"),
        (["configs/absent.yaml"], "configs/absent.yaml: no such file"),
        (["configs/tiny.yaml", "--set", "sft.stepps=3"], "sft.stepps: unknown field (did you mean steps?)"),
        (["configs/tiny.yaml", "--set", "ppo.stages.0.lr=-1"], "ppo.stages.0.lr: -1 is not allowed: must be greater"),
        (["configs/smollm2.yaml", "--set", "base.model=./absent"], "base.model: './absent' is not a directory"),
        (["configs/smollm2.yaml", "--set", "base.trainable_layers=31"], "base.trainable_layers: 31 is not allowed"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    outcome = xray_plan(*arguments)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith(f"error: {message}")
    assert len(outcome.stderr.strip().splitlines()) == 1
