"""`xray plan`: its JSON, its table, and bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.message_texts import Messages
from xray.cli.commands.plan import DENSE
from xray.cli.main import app
from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.cluster.pool.machine import GIB, Machine
from xray_runtime.methods.loading import load_config
from xray_runtime.ops.planner.auto import UNCHANGED, choose_layouts

ROOT = Path(__file__).parents[3]


def xray_plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def planned(*arguments: str) -> dict[str, Any]:
    outcome = xray_plan(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.output
    content: dict[str, Any] = json.loads(outcome.stdout)
    return content


def test_a_mixture_says_what_a_token_takes() -> None:
    content = planned("configs/moe.yaml", "--devices", "2", "--memory-gib", "4")
    experts = content["experts"]
    assert (experts["number"], experts["chosen"], experts["num_layers"]) == (8, 2, 2)
    # Three matrices of 64 · 64 in each of two layers' experts, of which a token leaves six in eight idle.
    assert experts["parameters"] == 2 * 8 * 3 * 64 * 64
    assert content["parameters"] - content["active_parameters"] == 2 * 6 * 3 * 64 * 64
    assert experts["tokens_each"] == content["micro_batch_tokens"] * 2 / 8


PAPER = ("--params", "7.5e9", "--devices", "64", "--memory-gib", "80")


def test_the_json_contract() -> None:
    content = planned(*PAPER)
    assert content["fits"] is True
    assert content["placement"] == "colocated"
    assert {k: round(v, 1) for k, v in content["model_state_gb"].items()} == {
        "0": 120.0,
        "1": 31.4,
        "2": 16.6,
        "3": 1.9,
    }
    roles = {"policy", "reference", "critic", "reward", "generator"}
    assert content["layout"].keys() == content["memory_gb"].keys() == content["breakdown_gb"].keys() == roles
    for name, layout in content["layout"].items():
        assert layout.keys() == {"zero_stage", "tp", "pp", "dp", "ep", "sp", "checkpointing", "num_devices"}
        assert layout["num_devices"] == layout["tp"] * layout["pp"] * layout["dp"]
        parts = dict(content["breakdown_gb"][name])
        loading = parts["weights"] + parts["process"] + parts.pop("loading")
        between = sum(parts[part] for part in ("weights", "optimizer", "kv_cache", "graphs", "process"))
        syncing = between + parts.pop("kept") + parts.pop("syncing")
        assert content["memory_gb"][name] == pytest.approx(max(sum(parts.values()), loading, syncing), abs=1e-3)
        assert content["memory_gb"][name] <= content["usable_gb"] == pytest.approx(0.9 * 80 * 1.073741824, abs=1e-3)
    # All five models are awake on all 64 GPUs.
    assert (content["in_turn"], content["trainer_sleeps"]) == (False, False)
    assert {layout["num_devices"] for layout in content["layout"].values()} == {64}
    assert content["peak_gb"] == pytest.approx(sum(content["memory_gb"].values()), abs=1e-3)
    assert content["max_num_seqs"] == 8  # 512 replies on 64 GPUs
    assert content["notes"] == [DENSE]
    [limit] = content["limits"]
    # 2 bytes of each of 7.5 × 10⁹ weights, whole on every GPU.
    assert limit == "the fullest device needs 74.9 of 77.3 usable GB, most of it generator's weights (15.0 GB)"
    assert content["reasons"] == content["suggestions"] == []
    seconds = content["seconds"]
    assert seconds.keys() == {"generate", "score", "update", "sync"}
    assert content["bottleneck"] == max(seconds, key=seconds.__getitem__)
    # 4 bytes of a checkpoint's parameters; of policy and critic two snapshots of 12.
    assert content["disk_gb"] == {
        "checkpoint": pytest.approx(30.0, rel=1e-3),
        "snapshots": pytest.approx(360, rel=1e-3),
    }


def test_where_nothing_fits_the_options_of_the_command_are_suggested() -> None:
    """Each suggestion can be given to the same command, which then has a plan."""
    same = ("--params", "7e9", "--devices", "2", "--memory-gib", "40")
    content = planned(*same)
    assert content["fits"] is False
    assert content["peak_gb"] > content["usable_gb"]
    by_change = {s["change"]: s["value"] for s in content["suggestions"]}
    assert planned("--params", "7e9", "--devices", str(by_change["num_devices"]), "--memory-gib", "40")["fits"]
    assert planned("--params", "7e9", "--devices", "2", "--memory-gib", str(by_change["memory_gib"]))["fits"]
    assert planned(*same, "--lora-rank", str(by_change["lora_rank"]))["fits"]


def test_plan_shows_the_layout_that_auto_takes(tmp_path: Path) -> None:
    """Layouts that are written in the config, Megatron's too, do not stand in the planner's way."""
    engine = "{num_workhorses: 2, tensor_parallel: 2, library: megatron, micro_batch_tokens: 512}"
    base = "{kind: fresh, hidden_size: 4096, num_layers: 32, num_heads: 32, num_kv_heads: 32, intermediate_size: 11008}"
    text = f"base: {base}\nsft: {{engine: {engine}}}\nppo: {{stages: [{{engine: {engine}}}]}}\n"
    (tmp_path / "config.yaml").write_text(text)
    content = planned(str(tmp_path / "config.yaml"), "--devices", "8", "--memory-gib", "80")
    written = load_config(tmp_path / "config.yaml")
    call = UNCHANGED.of_call(recorded_graph(written).calls["ppo-1"])
    chosen, _ = choose_layouts(call, Machine(num_devices=8, memory_bytes=80 * GIB))
    policy, layout = chosen.config.engine, content["stages"]["ppo-1"]["layout"]["policy"]
    assert (policy.num_workhorses, policy.zero_stage) == (layout["num_devices"], layout["zero_stage"])
    assert (policy.library, policy.tensor_parallel) == ("deepspeed", layout["tp"])


def test_a_flow_is_planned_like_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    asked = ("examples.two_judges:two_judges", "--devices", "8", "--memory-gib", "80")
    content = planned(*asked)
    assert list(content["stages"]) == ["sft", "upbeat-judge", "interesting-judge", "ppo", "evaluate"]
    models = set(content["stages"]["ppo"]["layout"])
    assert models == {"generator", "policy", "reference", "rewards.0", "rewards.1"}
    assert content["peak_gb"] == content["stages"][content["stage"]]["peak_gb"]
    # A parameter of the flow, and a field of one of its stages.
    changed = planned(*asked, "--set", "iterations=2", "--set", "ppo.critic=separate")
    assert set(changed["stages"]["ppo"]["layout"]) - models == {"critic"}
    assert "interesting-judge" in xray_plan(*asked).stdout


@pytest.mark.parametrize(
    "preset", sorted(p.name for p in (ROOT / "configs").glob("*.yaml") if p.stem != "custom" and "gpu" not in p.stem)
)
def test_every_preset_that_needs_no_hub_has_a_plan_here(preset: str) -> None:
    content = planned(str(ROOT / "configs" / preset))
    assert content["num_devices"] >= 1
    assert content["fits"] is True
    assert content["placement"] == "colocated"


def test_how_models_are_trained_shows(tmp_path: Path) -> None:
    options = "zero_stage: 3, precision: bfloat16, offload: nvme, nvme_path: /nvme, activation_checkpointing: true"

    def stage(rank: int) -> str:
        return f"{{engine: {{{options}, micro_batch_tokens: 512}}, lora: {{rank: {rank}}}}}"

    text = f"sft: {stage(8)}\nreward: {stage(2)}\nppo: {{stages: [{stage(8)}, {stage(4)}]}}\n"
    (tmp_path / "config.yaml").write_text(text)
    asked = (str(tmp_path / "config.yaml"), "--devices", "5", "--memory-gib", "80", "--set", "runtime.device=cuda")
    content = planned(*asked)
    for name, rank in (("sft", 8), ("ppo-1", 8), ("ppo-2", 4)):
        found = content["stages"][name]
        assert found["training"] == {"policy": {"weight_bytes": 2, "lora_rank": rank, "offload": True}}
        assert (found["layout"]["policy"]["zero_stage"], found["layout"]["policy"]["checkpointing"]) == (3, True)
        assert found["breakdown_gb"]["policy"]["optimizer"] == 0
    assert content["peak_gb"] == max(found["peak_gb"] for found in content["stages"].values())
    # In one column where a person looks.
    assert "ZeRO-3 DP5 bf16 LoRA 8 offload recompute" in xray_plan(*asked).stdout


def test_people_see_a_table_and_reasons() -> None:
    outcome = xray_plan("--params", "70e9", "--devices", "8", "--memory-gib", "80")
    assert outcome.exit_code == 0
    for words in ("no plan fits; nearest: colocated", "recompute", "limit", "not  colocated", "would fit with  13 dev"):
        assert words in outcome.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["configs/tiny.yaml", "--params", "1e9"],
        ["--params", "many"],
        ["--params", "-7e9"],
        ["--params", "inf"],
        ["--params", "1e9", "--devices", "0"],
        ["--params", "1e9", "--devices", "1.5"],
        ["--params", "1e9", "--memory-gib", "0"],
        ["--params", "1e9", "--memory-gib", "nan"],
        ["--params", "1e9", "--sequence-tokens", "1"],
        ["--params", "1e9", "--lora-rank", "0"],
        ["--params", "1e9", "--set", "seed=1"],
        ["configs/tiny.yaml", "--sequence-tokens", "9"],
        ["configs/absent.yaml"],
        ["configs/absent"],
        ["examples.two_judges:nobody"],
        ["examples.two_judges:two_judges", "--set", "stepz=3"],
        ["examples.two_judges:two_judges", "--set", "ppo.lr=-1"],
        ["configs/tiny.yaml", "--set", "sft.stepps=3"],
        ["configs/tiny.yaml", "--set", "ppo.stages.0.lr=-1"],
        ["configs/smollm2.yaml", "--set", "base.model=./absent"],
        ["configs/smollm2.yaml", "--set", "base.trainable_layers=31"],
        ["configs/smollm2.yaml", "--lora-rank", "8"],
        ["configs/tiny.yaml", "--set", "base={kind: checkpoint, ref: 'runs/a#sft'}"],
        ["configs/tiny.yaml", "--set", "runtime.cpus_per_workhorse=1000"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, message_texts: Messages
) -> None:
    monkeypatch.chdir(ROOT)
    outcome = xray_plan(*arguments)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    message_texts.check(outcome.stderr)
    assert len(outcome.stderr.strip().splitlines()) == 1
