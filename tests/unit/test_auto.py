"""`runtime.parallel: auto`: what a sensible person would choose, recorded, and the same every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xray_runtime.config import LifecycleConfig
from xray_runtime.config_io import ConfigError, load_config, validate
from xray_runtime.planning.auto import describe, settle
from xray_runtime.planning.workload import GIB, Machine
from xray_runtime.stages.spec import plan_stages

ROOT = Path(__file__).parents[2]
LAPTOP = Machine(num_devices=1, memory_bytes=16 * GIB, device="cpu")
SEVEN = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 32, "intermediate_size": 11008}
"""6.6 billion parameters with 2,048 tokens."""


def gpus(count: int, gib: int = 80) -> Machine:
    return Machine(num_devices=count, memory_bytes=gib * GIB)


def auto(base: dict[str, Any] | None = None, **stage: Any) -> LifecycleConfig:
    base = {"kind": "fresh", **(base or {})}
    return validate({"base": base, "ppo": {"stages": [stage]}, "runtime": {"parallel": "auto"}})


def layouts(config: LifecycleConfig) -> set[tuple[int, int]]:
    sections = [config.sft, config.reward, *config.ppo.stages]
    return {(section.engine.num_workhorses, section.engine.zero_stage) for section in sections}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_on_a_laptop_every_config_of_ours_stays_as_it_is(path: Path) -> None:
    """All cores serve the threads of one Workhorse: a second rank would only add communication."""
    if path.stem == "custom":
        pytest.skip("its model and data are the reader's")
    written = load_config(path)
    chosen, plan = settle(load_config(path, ["runtime.parallel=auto"]), LAPTOP)
    assert layouts(chosen) == {(1, 0)}
    assert chosen == written
    assert plan.placement == "colocated"
    assert describe(plan).startswith(
        "runtime.parallel: auto takes colocated, trained models on 1 Workhorses under ZeRO-0"
    )


def test_more_ranks_are_not_taken_than_a_step_has_micro_batches() -> None:
    # 32 sequences of 48 tokens are one micro-batch of 4,096; of 512 they are three.
    assert layouts(settle(auto(), Machine(num_devices=32, memory_bytes=8 * GIB, device="cpu"))[0]) == {(1, 0)}
    small = {"engine": {"micro_batch_tokens": 512}}
    config = validate({"sft": small, "reward": small, "ppo": {"stages": [small]}, "runtime": {"parallel": "auto"}})
    # The replies of SFT are the longest: 32 × (32 + 32) = 2,048 tokens.
    assert layouts(settle(config, Machine(num_devices=32, memory_bytes=8 * GIB, device="cpu"))[0]) == {(4, 0)}


def large(micro_batch_tokens: int, **stage: Any) -> LifecycleConfig:
    engine = {"engine": {"micro_batch_tokens": micro_batch_tokens}}
    base = {"kind": "fresh", **SEVEN}
    stages = [engine | stage]
    return validate(
        {"base": base, "sft": engine, "reward": engine, "ppo": {"stages": stages}, "runtime": {"parallel": "auto"}}
    )


def test_a_model_too_large_for_one_gpu_is_sharded_beside_the_others() -> None:
    """6.5 × 10⁹ parameters, float32, 77.3 usable GB; a step of 2,048 tokens has four micro-batches of 512.

    On four GPUs ZeRO-1 needs 8 + 12 / 4 = 11 bytes a parameter, 71 GB, and some 8 GB for bucket and passes; ZeRO-2
    4 + 16 / 4 = 8 bytes, 52 GB.
    """
    chosen, plan = settle(large(512), gpus(8))
    assert plan.placement == "separate"
    assert layouts(chosen) == {(4, 2)}
    assert chosen.runtime.gpus_per_workhorse == 1.0
    # With all tokens in one pass, one rank would be of use; all five that reference, reward model and generator leave
    # are needed: activations are 32 GB more.
    assert layouts(settle(large(4096), gpus(8))[0]) == {(5, 3)}
    # Two trained models share 13 GPUs, six each.
    assert layouts(settle(large(4096, critic="separate"), gpus(16))[0]) == {(6, 3)}
    with pytest.raises(ConfigError, match=r"runtime.parallel: .*: nothing fits; nearest is "):
        settle(large(4096), gpus(4, 40))


def test_small_models_share_gpus() -> None:
    chosen, _ = settle(auto(), gpus(1))
    assert layouts(chosen) == {(1, 0)}
    # Policy, reference, reward model and generator on one GPU; vLLM gets what it needs of it.
    assert chosen.runtime.gpus_per_workhorse == 0.25
    assert 0.01 <= chosen.runtime.gpu_memory_fraction <= 0.1
    assert settle(auto(), gpus(2))[0].runtime.gpus_per_workhorse == 0.5


def test_what_was_chosen_is_as_if_written_by_hand() -> None:
    chosen, _ = settle(auto(SEVEN), gpus(8))
    assert chosen == settle(auto(SEVEN), gpus(8))[0]
    assert chosen.runtime.parallel == "as_written"
    engine = {"engine": {"num_workhorses": 5, "zero_stage": 3}}
    base = {"kind": "fresh", **SEVEN}
    by_hand = validate({"base": base, "sft": engine, "reward": engine, "ppo": {"stages": [engine]}})
    assert [p.sections for p in plan_stages(chosen)] == [p.sections for p in plan_stages(by_hand)]


def test_what_is_chosen_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sft\.engine\.zero_stage = 2 must be left out with runtime"):
        validate({"sft": {"engine": {"zero_stage": 2}}, "runtime": {"parallel": "auto"}})
