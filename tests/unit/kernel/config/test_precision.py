"""The precision that `auto` means on each device."""

from __future__ import annotations

from typing import Any

import pytest

from xray_runtime.engines.layouts import EngineConfig, FrozenConfig
from xray_runtime.engines.trainers.megatron.config import MegatronConfig
from xray_runtime.methods.ppo.config import PPOConfig, PPOStageConfig
from xray_runtime.methods.sft.config import SFTConfig


def test_precision_is_what_a_device_is_good_at() -> None:
    """bfloat16 passes on GPUs, float32 on CPU; what is written stays, and DeepSpeed's ZeRO 0 keeps float32."""
    auto = SFTConfig()
    assert auto.resolved("cuda").engine.precision == "bfloat16"
    # Gradients are summed in float32 from ZeRO-1 on.
    assert (auto.engine.sharding_level, auto.resolved("cuda").engine.sharding_level) == (0, 1)
    assert auto.resolved("cpu").engine.precision == "float32"
    assert FrozenConfig().resolved("cuda").precision == "bfloat16"
    for field in ({"zero_stage": 0}, {"precision": "float32"}):
        assert EngineConfig.model_validate(field).resolved("cuda").precision == "float32"
    megatron = MegatronConfig(zero_stage=0).resolved("cuda")
    assert (megatron.precision, megatron.sharding_level) == ("bfloat16", 0)
    assert EngineConfig(precision="bfloat16").resolved("cpu").precision == "bfloat16"
    # In a section of a section, and in lists.
    ppo = PPOStageConfig(critic_engine=EngineConfig(), critic="separate").resolved("cuda")
    assert ppo.critic_engine is not None
    assert ppo.engine.precision == ppo.critic_engine.precision == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "device", "limit"),
    [
        ({}, "cpu", 1e-4),
        ({}, "cuda", 0.05),
        ({"engine": {"precision": "bfloat16"}}, "cpu", 0.05),
        # vLLM computes in bfloat16 there, the trainer alone does not.
        ({"engine": {"precision": "float32"}}, "cuda", 0.05),
        ({"engine": {"precision": "float32"}, "generator": {"engine": "transformers"}}, "cuda", 1e-4),
        ({"max_mismatch": 0.2}, "cpu", 0.2),
    ],
)
def test_generator_and_trainer_may_differ_by_what_their_precision_rounds(
    fields: dict[str, Any], device: str, limit: float
) -> None:
    assert PPOConfig.model_validate(fields).mismatch_limit(device) == limit
