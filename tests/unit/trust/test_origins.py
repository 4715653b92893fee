"""What a model goes back to, as its signed statement names it."""

from __future__ import annotations

from pathlib import Path

from tests.unit.trust.synthetic import Lifecycle
from xray_runtime.kernel.evidence.statement import OutsideSource, read_statement


def test_a_reward_model_is_no_base_of_the_policy_it_judges(tmp_path: Path) -> None:
    life = Lifecycle(tmp_path / "out", tracking=False)

    def named(stage: str, name: str) -> list[OutsideSource]:
        return [OutsideSource(field=f"{stage}.model", name=name, kind="hub", digest="ab" * 20)]

    weights = {"model.safetensors": b"weights"}
    life.add("base", "base", weights, {}, outside=named("base", "somebody/base"))
    judge = life.add("judge", "reward_base", weights, {}, outside=named("judge", "somebody/judge"))
    policy = life.add("policy", "ppo", weights, {"policy": "base", "rewards.0": "judge"})
    origins = [read_statement(ref.path).predicate.build.internal.origins for ref in (judge, policy)]
    assert [found["base_models"] for found in origins] == [["somebody/judge"], ["somebody/base"]]
