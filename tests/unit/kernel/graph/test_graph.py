"""A graph: its stages and their names, the fields and defaults of a call, the seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import xray
from tests.unit.kernel.graph.calls import brevity, parts, refused
from xray_runtime.engines.layouts import FrozenConfig, GeneratorConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Dataset, Model, RewardModel
from xray_runtime.kernel.graph.graph import Graph, StageCall, recording
from xray_runtime.kernel.graph.handles import Handle


def test_a_call_returns_a_handle_that_another_takes(graph: Graph) -> None:
    data, base, judge = parts()
    sft = xray.sft(base, data=data, steps=7)
    policy = xray.ppo(sft, data, reference=base, rewards=[judge])
    assert [type(handle) for handle in (data, base, judge, sft, policy)] == [Handle] * 5
    assert [handle.output for handle in (data, base, judge, sft)] == [Dataset, Model, RewardModel, Model]
    assert [repr(handle) for handle in (data, sft)] == ["<Dataset prepare>", "<Model sft>"]
    assert list(graph.calls) == ["prepare", "base", "preferences", "reward_model", "sft", "ppo"]
    call = graph.calls["ppo"]
    assert (call.kind, call.seed) == (xray.ppo, 3)
    assert call.parents == {"policy": sft, "prompts": data, "reference": base, "rewards.0": judge}
    assert sft.call is graph.calls["sft"]
    assert graph.calls["sft"].config_json()["steps"] == 7


def test_names_are_the_kinds_and_then_numbered(graph: Graph) -> None:
    names = [xray.base(model="x").name for _ in range(3)]
    assert names == ["base", "base-2", "base-3"]
    assert xray.base(model="x", name="mine").name == "mine"
    xray.base(model="x", name="base-4")
    assert xray.base(model="x").name == "base-5"


@pytest.mark.parametrize("name", ["", "../x", "a/b", "two words", ".hidden", "a\nb", "x" * 65, 7])
def test_a_name_is_part_of_file_names(name: Any, graph: Graph) -> None:
    said = refused(lambda: xray.base(model="x", name=name))
    assert said == f"name: {name!r} is not allowed: must match [A-Za-z0-9][A-Za-z0-9_.-]{{0,63}}"
    assert not graph.calls


def test_the_same_call_under_one_name_is_one_stage(graph: Graph) -> None:
    data, base, _ = parts()
    one = xray.sft(base, data, steps=7, name="mine")
    before = dict(graph.calls)
    assert xray.sft(base, data=data, steps=7, name="mine") is one
    assert graph.calls == before


@pytest.mark.parametrize(
    "again",
    [
        lambda base, data: xray.sft(base, data, steps=8, name="mine"),
        lambda base, data: xray.sft(xray.base(model="y"), data, steps=7, name="mine"),
        lambda base, data: xray.base(model="x", name="mine"),
    ],
)
def test_two_stages_of_one_name_are_refused(again: Callable[[Handle, Handle], Handle], graph: Graph) -> None:
    data, base, _ = parts()
    xray.sft(base, data, steps=7, name="mine")
    said = refused(lambda: again(base, data))
    assert said == "mine: two stages have this name; rename one with name=…"


def test_a_call_that_cannot_be_submitted_adds_no_stage() -> None:
    class Full(Graph):
        def submit(self, call: StageCall) -> None:
            if full:
                raise ConfigError("no room")

    full = True
    with Full() as graph:
        assert refused(lambda: xray.base(model="x", name="mine")) == "no room"
        assert not graph.calls
        full = False
        assert xray.base(model="y", name="mine").name == "mine"


def test_fields_are_refused_as_in_yaml(graph: Graph) -> None:
    data, base = xray.prepare(), xray.base(model="x")
    assert refused(lambda: xray.sft(base, data, steps=0)) == (
        "sft.steps: 0 is not allowed: must be greater than or equal to 1"
    )
    assert refused(lambda: xray.sft(base, data, stepps=3, name="mine")).startswith(  # type: ignore[call-arg]
        "mine.stepps: unknown field (did you mean steps?); allowed here: batch_size, betas,"
    )
    assert refused(lambda: xray.sft(base, data, engine={"zero_stage": 9})) == (
        "sft.engine.zero_stage: 9 is not allowed: must be less than or equal to 3"
    )
    assert refused(lambda: xray.preferences(source="dpo", data=data)) == (
        "preferences.source: \"dpo\" is not allowed: must be one of 'gold', 'ratings', 'dataset', 'judgements', "
        "'curated', 'rewards'"
    )
    assert refused(lambda: xray.ppo(base, data, minibatch_size=48, rewards=[brevity])) == (
        "ppo: minibatch_size = 48 must divide prompts_per_iteration × samples_per_prompt = 64"
    )


def test_registering_takes_a_policy_and_its_evaluation(graph: Graph) -> None:
    data, base = xray.prepare(), xray.base(model="x")
    result = xray.evaluate(base, base, data)
    xray.register(base, result)
    assert refused(lambda: xray.register(data)) == "register.policy: <Dataset prepare> is not allowed: must be a Model"
    assert refused(lambda: xray.register(base, base)) == (
        "register.evaluation: <Model base> is not allowed: must be an Evaluation"
    )
    assert refused(lambda: xray.register("sft")) == (  # type: ignore[arg-type]
        "register.policy: 'sft' is not allowed: must be a Model, the result of a stage"
    )


def test_a_reference_is_for_losses_that_have_one(graph: Graph) -> None:
    data, base = xray.prepare(source="math.jsonl"), xray.base(model="x")
    pairs = xray.preferences(data=data, source="dataset", path="pairs.jsonl")
    xray.dpo(base, pairs, reference=base)
    xray.dpo(base, pairs, loss="simpo", beta=2.0)
    message = refused(lambda: xray.dpo(base, pairs, reference=base, loss="simpo", beta=2.0))
    assert message == "dpo-3: reference: is not allowed with loss 'simpo', which does not use one"


def test_defaults_go_to_the_stages_that_have_them() -> None:
    defaults = {"generator": {"engine": "transformers"}, "frozen": FrozenConfig(num_workhorses=2), "gold": "vader"}
    with recording(defaults=defaults) as graph:
        data, base, _ = parts()
        xray.sft(base, data)
        policy = xray.ppo(base, data, rewards=[brevity])
        own = xray.ppo(base, data, rewards=[brevity], generator=GeneratorConfig(engine="deepspeed"))
        pairs = xray.preferences(base, data)
    configs = {name: call.config for name, call in graph.calls.items()}
    assert configs[policy.name].generator.engine == "transformers"
    assert configs[policy.name].frozen.num_workhorses == 2
    assert configs[own.name].generator.engine == "deepspeed"
    assert (configs[pairs.name].gold, configs[pairs.name].generator.engine) == ("vader", "transformers")
    assert not hasattr(configs["sft"], "generator")


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"generatr": {}}, "generatr: unknown field (did you mean generator?): no stage kind has a field of this name"),
        ({"qqq": 1}, "qqq: unknown field: no stage kind has a field of this name"),
    ],
)
def test_a_default_that_nothing_reads_is_refused(defaults: dict[str, Any], message: str) -> None:
    assert refused(lambda: Graph(defaults=defaults)) == message


@pytest.mark.parametrize("seed", [-1, 2**31, 1.0, True, "1", None])
def test_a_seed_that_cannot_be_one(seed: Any) -> None:
    assert refused(lambda: Graph(seed)) == f"seed: {seed!r} is not allowed: must be a whole number from 0 to 2147483647"


def test_a_shortened_graph_has_the_same_stages() -> None:
    def written() -> None:
        data, base, kind = parts()
        xray.ppo(xray.sft(base, data, steps=90), data, rewards=[kind], iterations=90)

    with recording() as whole:
        written()
    with Graph(shorten=True) as short:
        written()
    assert list(short.calls) == list(whole.calls)
    assert (short.calls["sft"].config.steps, short.calls["ppo"].config.iterations) == (2, 2)
    assert short.calls["prepare"].config == whole.calls["prepare"].config


def test_a_graph_has_a_runtime() -> None:
    assert Graph().runtime == RuntimeConfig()


def test_pictures_need_a_generator_that_reads_them(graph: Graph) -> None:
    data, base, kind = parts(pictures="drawn")
    line = "data.pictures = 'drawn' is not supported with generator.engine = 'vllm' (transformers can)"
    assert refused(lambda: xray.ppo(base, prompts=data, rewards=[kind])) == f"ppo: {line}"
    assert refused(lambda: xray.evaluate(base, base, data)) == f"evaluate: {line}"
    options = {"rewards": [kind], "generator": {"engine": "transformers"}}
    xray.ppo(base, prompts=data, **options)
