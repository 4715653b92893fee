"""Which way weights take, by where trainer and generator are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.message_texts import Messages
from xray_runtime.cluster.protocols import Ready
from xray_runtime.cluster.whole_model import WholeModel
from xray_runtime.engines.capabilities import Transport
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sync.route import Device, Route, choose
from xray_runtime.engines.training_config import check_sampled
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.models.lora import LoRAConfig

CPU = [Device("a")]
GPU_0, GPU_1 = Device("a", "GPU-0"), Device("a", "GPU-1")
VLLM = GeneratorConfig()


@pytest.mark.parametrize(
    ("trainer", "generator", "way"),
    [
        (CPU, CPU, "plasma"),
        ([GPU_0], CPU, "plasma"),
        ([GPU_0], [GPU_0], "ipc"),
        ([GPU_0, GPU_1], [GPU_1], "ipc"),
        ([GPU_0], [GPU_1], "nccl"),
        # Of two generator ranks one shares the trainer's device: neither of vLLM's ways serves both.
        ([GPU_0], [GPU_0, GPU_1], "plasma"),
    ],
)
def test_the_shortest_way_is_taken(trainer: list[Device], generator: list[Device], way: Transport) -> None:
    assert choose("auto", VLLM, trainer, generator) == way
    assert choose(way, VLLM, trainer, generator) == way
    assert choose("plasma", VLLM, trainer, generator) == "plasma"
    assert choose("auto", GeneratorConfig(engine="transformers"), trainer, generator) == "plasma"


@pytest.mark.parametrize("wanted", ["nccl", "ipc"])
def test_an_unavailable_transfer_is_refused(wanted: Transport) -> None:
    with pytest.raises(
        ValueError, match=rf"^runtime.weight_transfer = '{wanted}' is not .*; available here: 'plasma'$"
    ):
        choose(wanted, VLLM, CPU, CPU)


QKV = {f"layers.0.{name}_proj.weight" for name in "qkv"}


class Follower(WholeModel):
    """A generator on the GPU of the trainer; its vLLM holds q, k and v in one layer."""

    def __init__(self, wanted: Transport | str) -> None:
        self._spec: Any = SimpleNamespace(layout=VLLM, adapter=None)
        self._runtime = RuntimeConfig(weight_transfer=wanted)  # type: ignore[arg-type]
        self._routes, self._workhorses, self._num_replicas = {}, [], 1
        self.loaded: list[Any] = []

    def where(self) -> list[Device]:
        return [GPU_0]

    def _call(self, call: Any) -> list[Any]:
        asked: list[set[str]] = []
        call(SimpleNamespace(layers_of=SimpleNamespace(remote=asked.append)))
        return [asked[0] | QKV if asked[0] & QKV else asked[0]]

    def load_weights(self, update: Any) -> int:
        self.loaded.append(update)
        return 1


class Policy:
    """A trained policy that notes how its weights are asked for."""

    def __init__(self, trained: set[str] | None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.where = SimpleNamespace(remote=lambda: Ready([GPU_0]))
        self.whole_weight_names = SimpleNamespace(remote=lambda: Ready(trained))
        self.export_weights = SimpleNamespace(remote=self._note(SimpleNamespace(digest="digest")))
        self.send_weights = SimpleNamespace(remote=self._note(None))

    def _note(self, answer: Any) -> Any:
        return lambda *args: (self.calls.append(args), Ready(answer))[1]


@pytest.mark.parametrize(
    "trained", [None, {"layers.0.q_proj.weight", "layers.0.v_proj.weight"}], ids=["pipeline", "LoRA on q and v"]
)
def test_weights_that_vllm_would_load_wrongly_go_through_the_object_store(
    trained: set[str] | None, message_texts: Messages
) -> None:
    policy: Any = Policy(trained)
    follower = Follower("auto")
    assert follower.follow(policy, 1) == "digest"
    # In shared memory, since both are on one machine, and in half precision, as vLLM holds them on a GPU.
    assert policy.calls == [(1, True, "bfloat16", True)]
    assert len(follower.loaded) == 1
    with message_texts.raises(ValueError):
        Follower("ipc").follow(policy, 1)


def test_whole_layers_go_from_gpu_to_gpu() -> None:
    policy: Any = Policy(QKV | {"norm.weight"})
    assert Follower("auto").follow(policy, 3) is None
    assert policy.calls == [(3, Route("vllm", "ipc", True, "bfloat16"), [], 0)]


@pytest.mark.parametrize(
    ("targets", "refused"),
    [(None, False), (["o_proj", "gate_proj", "up_proj"], False), (["q_proj", "v_proj"], True), (["up_proj"], True)],
)
def test_adapters_on_a_part_of_a_fused_layer_are_refused_before_the_run(
    targets: list[str] | None, refused: bool
) -> None:
    lora = LoRAConfig(target_modules=targets)
    runtime = RuntimeConfig(weight_transfer="nccl")
    if not refused:
        check_sampled(lora, VLLM, runtime)
        return
    with pytest.raises(ValueError, match=r"^lora.target_modules: .* is not supported with runtime.weight_tr"):
        check_sampled(lora, VLLM, runtime)
