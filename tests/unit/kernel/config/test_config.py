"""The config schema: everything wrong is one line that names the field, the value and what is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings, strategies as st
from pydantic import BaseModel

from tests.message_texts import Messages
from xray.flows.lifecycle_graph import recorded_graph
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.methods.lifecycle import LifecycleConfig
from xray_runtime.methods.loading import load_config, resolved_yaml, validate
from xray_runtime.rewards.term import SourceRoute

PRESETS = sorted((Path(__file__).parents[4] / "configs").glob("*.yaml"))

MIXTURE = "base: {kind: fresh, num_experts: 4, num_heads: 4, num_kv_heads: 4, hidden_size: 128}"
REFUSED = [
    # unknown fields
    "stepps: 3",
    "sft: {stepps: 3}",
    "sft: {engine: {zero: 3}}",
    "ppo: {stages: [{lrr: 0.1}]}",
    "ppo: {stages: [{}, {kl: {coeff: 0.1}}]}",
    "base: {kind: fresh, model: gpt2}",
    "preferences: {source: gold, rating: upbeat}",
    # wrong types
    "seed: abc",
    "seed: 1.5",
    "seed: true",
    "seed: '1'",
    "seed: null",
    "sft: 3",
    "sft: []",
    "sft: {lr: fast}",
    "sft: {lr: [1]}",
    "ppo: {stages: {lr: 1}}",
    "ppo: {stages: [3]}",
    "ppo: {stages: [{whiten_advantages: 1}]}",
    "ppo: {stages: [{whiten_advantages: yes}]}",
    "data: {source: 3}",
    "sft: {betas: 0.9}",
    "sft: {betas: [0.9]}",
    # out of range
    "seed: -1",
    "seed: 2147483648",
    "sft: {lr: 0}",
    "sft: {lr: .nan}",
    "sft: {lr: .inf}",
    "sft: {steps: 0}",
    "sft: {warmup_fraction: 1.0}",
    "sft: {betas: [0.9, 1.5]}",
    "sft: {grad_clip: 0}",
    "sft: {engine: {zero_stage: 4}}",
    "sft: {engine: {num_workhorses: 0}}",
    "data: {heldout_fraction: 1}",
    "data: {heldout_fraction: 0}",
    "data: {source: ''}",
    "ppo: {stages: [{ledger: {keep: 0}}]}",
    "ppo: {stages: [{ledger: {tokens: no}}]}",
    "ppo: {stages: []}",
    "ppo: {stages: [{clip_range: 1.5}]}",
    "ppo: {stages: [{dual_clip: 1.0}]}",
    "ppo: {stages: [{gamma: 1.1}]}",
    "ppo: {stages: [{importance_cap: 1}]}",
    "evaluate: {num_prompts: 2}",
    "promotion: {max_regression: 0.9}",
    "promotion: {max_kll: 0.9}",
    "runtime: {retries: 99}",
    # not one of the allowed words
    "project: Up/Case",
    "gold: bleu",
    "data: {source: 'https://me:s3cr3t@host/a'}",
    "gold: os:system",
    "sft: {schedule: step}",
    "ppo: {stages: [{kl: {estimator: k4}}]}",
    "ppo: {stages: [{critic: none}]}",
    "runtime: {device: tpu}",
    "base: {kind: llama}",
    "base: {vocab_size: 512}",
    "preferences: {source: dpo}",
    "rewards: [{verifier: {}}]",
    "benchmarks: {a: {}}",
    "benchmarks: {a: {suite: perplexity, num_row: 1}}",
    "ppo: {stages: [{environment: {agent: 'a:b', max_call: 3}}]}",
    "base: {kind: pretrained}",
    "preferences: {source: dataset}",
    # impossible combinations
    "data: {min_chars: 50, max_chars: 40}",
    "base: {kind: fresh, hidden_size: 100, num_heads: 5}",
    "base: {kind: fresh, num_kv_heads: 2}",
    "sft: {batch_size: 2, engine: {num_workhorses: 4}}",
    "sft: {engine: {tensor_parallel: 2}}",
    "sft: {engine: {pipeline_parallel: 2, num_workhorses: 4, zero_stage: 3}}",
    "sft: {engine: {library: megatron, zero_stage: 2, num_workhorses: 2}}",
    "{base: {kind: fresh, num_heads: 10, num_kv_heads: 10, hidden_size: 320, intermediate_size: 449}, "
    "sft: {engine: {library: megatron, tensor_parallel: 2, num_workhorses: 2}}}",
    "sft: {engine: {library: megatron, pipeline_parallel: 3, num_workhorses: 3}}",
    "{base: {kind: pretrained, model: x, trainable_layers: 2}, sft: {engine: {library: megatron}}}",
    "sft: {batch_size: 1, engine: {pipeline_parallel: 2, num_workhorses: 4}}",
    "reward: {engine: {tensor_parallel: 2, num_workhorses: 2}}",
    "ppo: {stages: [{engine: {pipeline_parallel: 5, num_workhorses: 5}}]}",
    "frozen: {num_workhorses: 3, tensor_parallel: 2}",
    "frozen: {num_workhorses: 2, tensor_parallel: 2, zero_stage: 3}",
    "frozen: {num_workhorses: 16}\nevaluate: {num_prompts: 8}",
    "ppo: {stages: [{critic_engine: {}}]}",
    "ppo: {stages: [{critic: separate, critic_engine: {tensor_parallel: 2, num_workhorses: 2}}]}",
    "{base: {kind: pretrained, model: x, trainable_layers: 2}, sft: {engine: {pipeline_parallel: 2, "
    "num_workhorses: 2}}}",
    "{base: {kind: pretrained, model: x, trainable_layers: 2}, sft: {engine: {sequence_parallel: 2, "
    "num_workhorses: 2}}}",
    "sft: {engine: {sequence_parallel: 2, num_workhorses: 3}}",
    "frozen: {sequence_parallel: 2, tensor_parallel: 2, num_workhorses: 4}",
    "sft: {engine: {library: megatron, sequence_parallel: 2, num_workhorses: 2}}",
    "sft: {engine: {sequence_parallel: 2, num_workhorses: 2}}",
    "sft: {engine: {precision: float16}}",
    "sft: {engine: {precision: bfloat16, zero_stage: 0}}",
    "ppo: {stages: [{critic: separate, critic_engine: {offload: cpu, zero_stage: 0}}]}",
    "reward: {engine: {zero_stage: 2, offload: nvme, nvme_path: /nvme}}",
    "sft: {engine: {zero_stage: 3, offload: nvme}}",
    "sft: {engine: {nvme_path: /nvme}}",
    "sft: {lora: {dropout: 0.1}}",
    "sft: {lora: {rank: 0}}",
    "sft: {lora: {target_modules: []}}",
    "reward: {lora: {target_modules: [lm_head]}}",
    "sft: {lora: {quantize: nf4}, engine: {library: megatron}}",
    "ppo: {stages: [{adapter_sync: adapter}]}",
    "ppo: {stages: [{lora: {}, engine: {num_workhorses: 4, tensor_parallel: 2, pipeline_parallel: 2}}]}",
    "{generator: {engine: deepspeed}, ppo: {stages: [{lora: {}, adapter_sync: adapter}]}}",
    "ppo: {stages: [{lora: {dora: true}, adapter_sync: adapter}]}",
    "{base: {kind: fresh, num_experts: 4},"
    " ppo: {stages: [{lora: {target_modules: [experts]}, adapter_sync: adapter}]}}",
    "ppo: {stages: [{lora: {quantize: nf4}, adapter_sync: adapter}]}",
    "sft: {lora: {quantize: nf4}, engine: {tensor_parallel: 2, num_workhorses: 2}}",
    "sft: {lora: {target_modules: [v_proj, layers.0.q_proj]}, engine: {pipeline_parallel: 2, num_workhorses: 2}}",
    "sft: {lora: {quantize: nf4, dora: true}}",
    "reward: {lora: {target_modules: [experts]}}",
    "generator: {engine: vllm, quantization: int4}",
    "{ppo: {stages: [{trainable_layers: 2, lora: {}}]}}",
    "ppo: {stages: [{routing: replay}]}",
    "ppo: {stages: [{routing: recorded}]}",
    f"{{ppo: {{stages: [{{routing: replay}}]}}, generator: {{engine: deepspeed}}, {MIXTURE}}}",
    f"{{ppo: {{stages: [{{routing: replay}}]}}, runtime: {{device: cuda}}, {MIXTURE}}}",
    f"{{ppo: {{stages: [{{routing: replay, trainable_layers: 1}}]}}, {MIXTURE}}}",
    f"{{ppo: {{stages: [{{routing: replay, engine: {{library: megatron}}}}]}}, {MIXTURE}}}",
    f"{{ppo: {{stages: [{{routing: replay, engine: {{tensor_parallel: 2, num_workhorses: 2}}}}]}}, {MIXTURE}}}",
    f"{{ppo: {{stages: [{{routing: replay, environment: {{path: 'game:Game'}}}}]}}, {MIXTURE}}}",
    "reward: {batch_size: 1, engine: {num_workhorses: 2}}",
    "ppo: {stages: [{minibatch_size: 48}]}",
    "ppo: {stages: [{minibatch_size: 1, engine: {num_workhorses: 2}}]}",
    "ppo: {stages: [{lag: 9}]}",
    "ppo: {stages: [{lag: 1, importance_correction: none}]}",
    "{ppo: {stages: [{}, {lag: 1}]}, runtime: {device: cuda, generator_sleeps: true}}",
    "gold: null",
    "{data: {source: x.jsonl}, preferences: {source: ratings}}",
    "data: {max_prompt_tokens: 45}\nbase: {kind: fresh, max_positions: 60}",
    "generator: {engine: mystery}",
    "generator: {engine: transformers, tensor_parallel: 2}",
    "generator: {tensor_parallel: 2}",
    "{runtime: {device: cpu, weight_transfer: nccl}}",
    "{runtime: {generator_sleeps: true}, generator: {engine: transformers}}",
    "runtime: {trainer_sleeps: true, device: cpu}",
    "reward: null",
    "dpo: {}",
    "ppo: null",
    "{ppo: null, dpo: {}, reward: null, preferences: null}",
    "{ppo: null, dpo: {beta: 0}}",
    "{ppo: null, dpo: {loss: orpo}}",
    "{ppo: null, dpo: {label_smoothing: 0.5}}",
    "{ppo: null, dpo: {loss: ipo, label_smoothing: 0.1}}",
    "{ppo: null, dpo: {gamma: 0.5}}",
    "{ppo: null, dpo: {batch_size: 1, engine: {num_workhorses: 2}}}",
    "{ppo: null, dpo: {engine: {precision: bfloat16, zero_stage: 0}}}",
    "preferences: null",
    "{reward: null, preferences: null}",
    "reward_base: {model: x}",
    "{reward: null, preferences: null, reward_ref: DIR#reward, reward_base: {model: x}}",
    "reward_base: {}",
    "reward_base: x",
    "reward_base: {model: x, num_replies: 1}",
    "reward_ref: DIR#reward",
    "rewards: [{function: 'os:system'}]",
    "rewards: [{verifier: {kind: math, column: answer}}]",
    "rewards: [{service: {url: 'ftp://host'}}]",
    "rewards: [{weight: 2}]",
    "reward: {epochs: 0}",
    "reward: {epochss: 1}",
    "ppo: {stages: [{critic_engine: {zero: 1}}]}",
    "preferences: {source: judgements}",
    "base: {kind: checkpoint}",
    # not a config at all
    "[1, 2]",
    "just words",
    "seed: [1",
    "seed: 1\nseed: 2",
    "a: &x {}\nb: *x",
    "!!python/object/apply:os.system ['true']",
]


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:90])
def test_refused_with_one_clear_line(text: str, tmp_path: Path, message_texts: Messages) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with message_texts.raises(ConfigError) as caught:
        recorded_graph(load_config(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "--set 'seed' is not allowed: must be KEY.PATH=VALUE"),
        ("=3", "must be KEY.PATH=VALUE"),
        ("sft..lr=1", "must be KEY.PATH=VALUE"),
        ("seed.deep=1", "--set seed.deep: seed is a number and has no field 'deep'"),
        ("ppo.stages.7.lr=1", "--set ppo.stages.7.lr: 7 is not allowed: ppo.stages has items 0 to 0"),
        ("ppo.stages.first.lr=1", "first is not allowed: ppo.stages has items 0 to 0"),
        ("sft.lr=-1", "sft.lr: -1 is not allowed: must be greater than 0"),
        ("sft.lr=", "sft.lr: null is not allowed: must be a number"),
        ("sft.lr=[", "--set sft.lr:1: not valid YAML"),
    ],
)
def test_bad_overrides(override: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("seed: 1")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: no such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"project: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(tmp_path / "latin.yaml")


def test_numbers_mean_what_people_mean(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("{seed: 010, sft: {lr: 1e-4, steps: 7}, gold: vader}")
    config = load_config(path, ["sft.lr=3e-3", "ppo.stages.0.clip_range=0.1", "runtime.threads=1"])
    assert (config.seed, config.sft.lr, config.sft.steps) == (10, 3e-3, 7)
    assert (config.ppo.stages[0].clip_range, config.runtime.threads) == (0.1, 1)
    assert config.ppo.stages[0].lr == LifecycleConfig().ppo.stages[0].lr


def test_an_override_may_replace_a_whole_list(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("")
    config = load_config(path, ["ppo.stages=[{lr: 0.1}, {lr: 0.2}, {}]", "ppo.stages.2.lr=0.3"])
    assert [stage.lr for stage in config.ppo.stages] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_presets_load_and_survive_the_round_trip(preset: Path, tmp_path: Path) -> None:
    # Presets that point at the user's own files still validate: paths are looked up when the stage runs.
    config = load_config(preset)
    again = tmp_path / "again.yaml"
    again.write_text(resolved_yaml(config))
    assert load_config(again) == config


def _properties(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    owners = {"LifecycleConfig": schema} | schema["$defs"]
    return [(f"{owner}.{name}", field) for owner, s in owners.items() for name, field in s["properties"].items()]


def test_prefects_form_has_types_and_descriptions() -> None:
    schema = LifecycleConfig.model_json_schema()
    described = [name for name, field in _properties(schema) if field.get("description")]
    assert len(described) > 70
    assert "ppo" in schema["properties"]
    lr = schema["$defs"]["PPOStageConfig"]["properties"]["lr"]
    assert lr["exclusiveMinimum"] == 0
    assert lr["default"] == 3e-4


def test_each_field_reaches_the_stages_that_read_it_and_no_other() -> None:
    def stages(**fields: Any) -> dict[str, dict[str, Any]]:
        graph = recorded_graph(LifecycleConfig.model_validate(fields))
        return {name: call.config_json() for name, call in graph.calls.items()}

    plain = stages()
    assert list(plain) == ["prepare", "base", "sft", "preferences", "reward", "ppo-1", "evaluate"]

    def changed(**fields: Any) -> set[str]:
        other = stages(**fields)
        return {name for name in plain if plain[name] != other[name]}

    assert changed(generator={"engine": "transformers"}) == {"preferences", "ppo-1", "evaluate"}
    assert changed(frozen={"num_workhorses": 2}) == {"ppo-1", "evaluate"}
    assert changed(evaluate={"num_prompts": 8}) == {"evaluate"}
    assert changed(data={"min_chars": 3}) == {"prepare"}
    # What a result does not depend on is in no stage's config.
    assert changed(runtime={"generator_replicas": 4}, promotion={"max_kl": 1.0}, project="other") == set()


def test_stages_may_be_absent() -> None:
    def names(**fields: Any) -> list[str]:
        return list(recorded_graph(LifecycleConfig.model_validate(fields)).calls)

    pretrained = {"kind": "pretrained", "model": "x"}
    assert "sft" not in names(sft=None, base=pretrained)
    no_model = {"preferences": None, "reward": None}
    assert names(**no_model, reward_ref="DIR#reward") == ["prepare", "base", "sft", "ppo-1", "evaluate"]
    with_base = ["prepare", "base", "sft", "reward_base", "ppo-1", "evaluate"]
    assert names(**no_model, reward_base={"model": "x"}) == with_base
    two = names(ppo={"stages": [{}, {"iterations": 2}]})
    assert two[-3:] == ["ppo-1", "ppo-2", "evaluate"]
    assert names(base={"kind": "checkpoint", "ref": "DIR#sft"}, sft=None)[:2] == ["prepare", "preferences"]


def test_a_config_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        LifecycleConfig().seed = 3  # type: ignore[misc]


def test_checking_a_config_imports_nothing_heavy() -> None:
    heavy = {"torch", "ray", "prefect", "mlflow", "transformers"}
    code = f"import sys, xray_runtime.kernel.config.loading; print({heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _paths(model: type[BaseModel]) -> list[str]:
    names = list(model.model_fields)
    return names + [f"{n}.{m}" for n in names for m in ("lr", "steps", "stages", "engine", "kind")]


@settings(max_examples=15)
@given(st.sampled_from(_paths(LifecycleConfig)), JSON)
@example("data", {"\n": None})
def test_any_value_is_accepted_or_refused_in_one_line(path: str, value: Any) -> None:
    first, _, second = path.partition(".")
    data = {first: {second: value} if second else value}
    try:
        config = validate(data)
    except ConfigError as error:
        message = str(error)
    else:
        message = first
        assert validate(yaml.safe_load(resolved_yaml(config))) == config
    assert first in message
    assert "\n" not in message


def test_dpo_takes_the_place_of_ppo() -> None:
    config = validate({"ppo": None, "dpo": {"beta": 0.2}, "reward": None})
    assert config.ppo_stages == []
    assert set(config.trained) == {"sft", "dpo"}
    graph = recorded_graph(config)
    assert list(graph.calls) == ["prepare", "base", "sft", "preferences", "dpo", "evaluate"]
    call = graph.calls["dpo"]
    assert call.config.beta == 0.2
    assert {role: handle.name for role, handle in call.parents.items()} == {
        "policy": "sft",
        "preferences": "preferences",
    }
    # A reward model that is trained too learns from the same pairs, and judges.
    both = recorded_graph(validate({"ppo": None, "dpo": {}}))
    assert list(both.calls) == ["prepare", "base", "sft", "preferences", "reward", "dpo", "evaluate"]
    assert both.calls["evaluate"].parents["rewards.0"].name == "reward"
    assert both.calls["reward"].parents["data"] is both.calls["dpo"].parents["preferences"]


def test_judges_of_the_evaluation_are_among_its_inputs() -> None:
    config = validate({"evaluate": {"heldout_reward_model": 0.3, "verdicts": "DIR/checkpoints/judgements-1"}})
    calls = recorded_graph(config).calls
    parents = {role: handle.name for role, handle in calls["evaluate"].parents.items()}
    assert (parents["judges.0"], parents["verdicts"]) == ("judge", "DIR/checkpoints/judgements-1")
    # The judge and the reward learn from different parts of the pairs.
    assert [calls[name].parents["data"].name for name in ("judge", "reward")] == ["judge-pairs", "training-pairs"]
    assert "verdicts" not in recorded_graph(validate({})).calls["evaluate"].parents


def test_a_judge_that_compares_is_none_of_the_evaluation() -> None:
    judge = {"url": "http://localhost:8000/v1", "model": "m", "rubric": "r"}
    rewards = [{"judge": judge | {"opponents": 3}}, {"judge": judge}]
    config = validate({"rewards": rewards, "ppo": {"stages": [{"method": "grpo"}]}})
    calls = recorded_graph(config).calls
    assert [term.compares for term in calls["ppo-1"].config.rewards] == [False, True, False]
    assert [term.compares for term in calls["evaluate"].config.rewards] == [False, False]
    assert calls["evaluate"].parents["rewards.0"].name == "reward"


@pytest.mark.parametrize(
    ("written", "zero"),
    [
        ({}, 0),
        ({"precision": "bfloat16"}, 1),
        ({"offload": "cpu"}, 1),
        ({"offload": "nvme", "nvme_path": "/nvme"}, 3),
        ({"precision": "bfloat16", "zero_stage": 2}, 2),
    ],
)
def test_a_zero_stage_left_out_is_the_lowest_that_has_what_is_asked_for(written: dict[str, Any], zero: int) -> None:
    engine = EngineConfig(**written)
    assert engine.sharding_level == zero
    engine.check_written()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ppo: {stages: [{rewards: []}]}",
            "ppo.stages.0.rewards: unknown field (it belongs at the top level of the config)",
        ),
        ("lr: 0.1", "lr: unknown field (it belongs at sft.lr or reward.lr or dpo.lr)"),
        (
            "sft: {num_pairs: 3}",
            "sft.num_pairs: unknown field (it belongs at preferences.num_pairs or dpo.validation.num_pairs)",
        ),
        ("stpes: 3", "stpes: unknown field (did you mean"),
    ],
)
def test_a_field_in_the_wrong_section_is_told_where_it_belongs(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("equals", "value", "applies"),
    [
        ("math", "math", True),
        ("math", "Math", False),
        ("math", 1, False),
        ("math", None, False),
        (1, 1, True),
        (1, 1.0, True),
        (1, 2, False),
        (True, True, True),
        (True, False, False),
        ("1", 1, None),
        (1, "1", None),
        (1, True, None),
        ("true", True, None),
        ("None", None, False),
    ],
)
def test_a_route_compares_by_type(equals: Any, value: Any, applies: bool | None) -> None:
    route = SourceRoute(column="task", equals=equals)
    if applies is None:
        with pytest.raises(ValueError, match=r"when\.equals = .* the column 'task' has .*: must be of the same type"):
            route.applies(value)
    else:
        assert route.applies(value) is applies
