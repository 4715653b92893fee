"""`--adapter NAME=REF`: what cannot be served beside a base is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.kernel.store.published import IDENTITY
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import ADAPTER
from xray_runtime.kernel.history.reference import resolve
from xray_runtime.kernel.store.checkpoints import Store
from xray_runtime.live.serving import NotServedError
from xray_runtime.live.serving.adapters import chosen_adapters
from xray_runtime.live.serving.choice import ModelChoice
from xray_runtime.models.adapter_files import write_adapter
from xray_runtime.models.lora import LoRAConfig

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def publish(output: Path, stage: str, base: str | None = None, lora: LoRAConfig | None = None) -> str:
    store, identity = Store(output / "checkpoints"), IDENTITY.model_copy(update={"stage": stage, "parents": {}})
    with store.building(stage, identity.key) as built:
        (built / "config.json").write_text("{}")
        if base is not None:
            tensors = {f"{LAYER}.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
            write_adapter(built / ADAPTER, lora or LoRAConfig(rank=2), tensors, "sft", base)
        return store.publish(built, identity, type="Model", step=0, dataset=None).sha256


@pytest.fixture
def output(tmp_path: Path) -> Path:
    base = publish(tmp_path, "sft")
    publish(tmp_path, "tuned", base)
    publish(tmp_path, "dora", base, LoRAConfig(rank=2, dora=True))
    publish(tmp_path, "wide", base, LoRAConfig(rank=1024))
    publish(tmp_path, "stranger", "ab" * 32)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["tuned"], "must be NAME=REF"),
        (["=tuned"], "must be NAME=REF"),
        (["sft=tuned"], "'sft' already names a model"),
        (["a=sft"], "was published without an adapter"),
        (["a=stranger"], r"belongs to sft \(abababababab\), not to sft "),
        (["a=dora"], "dora"),
        (["a=wide"], "at most 512"),
        (["a=absent"], "absent"),
    ],
)
def test_what_is_no_adapter_of_the_base_is_refused(output: Path, given: list[str], why: str) -> None:
    store, node = resolve("sft", output, None)
    base = ModelChoice(store, node, ("sft",))
    with pytest.raises(ConfigError, match=why) as caught:
        chosen_adapters(given, base, output, None, None)
    assert "\n" not in str(caught.value)


def test_an_adapter_is_audited_before_it_is_served(output: Path) -> None:
    store, node = resolve("sft", output, None)
    with pytest.raises(NotServedError, match=r"^tuned.*the audit found"):
        chosen_adapters(["a=tuned"], ModelChoice(store, node, ("sft",)), output, None, None)
