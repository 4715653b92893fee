"""A trainer's connection with a generator, without a GPU: what travels, and how often they meet."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import ray
import torch

from tests.component.processes import Receiver
from xray_runtime.cluster.learner import _receive
from xray_runtime.engines.generator import Receivers
from xray_runtime.engines.generators.vllm.send import Sender

WEIGHTS = {"a": torch.tensor([1.0, 1.0 + 2**-12]), "b": torch.ones(2, 3)}


class FakeEngine:
    """vLLM's trainer engine without a device: it calls its client as vLLM's does."""

    made: list[FakeEngine]
    fails = False

    def __init__(self, client: Any, source: Any) -> None:
        self.client, self.source, self.closed = client, source, False
        self.sent: list[dict[str, torch.Tensor]] = []

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any) -> FakeEngine:
        cls.made.append(cls(client, source))
        client.init_weight_transfer_engine({"world_size": init_info.world_size})
        return cls.made[-1]

    def send_weights(self) -> None:
        self.client.start_weight_update()
        declared = {meta.name: (meta.dtype, meta.shape) for meta in self.source.metadata()}
        self.sent.append(dict(self.source))
        assert declared == {name: (t.dtype, tuple(t.shape)) for name, t in self.sent[-1].items()}
        if self.fails:
            raise RuntimeError("the broadcast broke")
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.closed = True


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    # Not at the top: every process that collects tests would import vLLM.
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    monkeypatch.setattr(FakeEngine, "made", [], raising=False)
    monkeypatch.setitem(WeightTransferTrainerFactory._registry, "nccl", lambda: FakeEngine)
    return FakeEngine.made


def test_one_connection_serves_all_syncs_in_half_precision(cluster: None, engines: list[FakeEngine]) -> None:
    gathered = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        gathered.append(len(gathered))
        yield from WEIGHTS.items()

    receiver: Any = Receiver.remote()
    sender = Sender("nccl", tensors, 0, Receivers(1, 1, partial(_receive, [receiver])))
    for version in (1, 2):
        sender.send(version, ("127.0.0.1", 1234))
    [engine] = engines
    # Once for the shapes, and once a sync.
    assert len(gathered) == 3
    assert ray.get(receiver.noted.remote()) == [("init", 1), ("start", 1), ("finish", 1), ("start", 2), ("finish", 2)]
    # bfloat16 has 8 bits of precision: 1 + 2⁻¹² is rounded to 1.
    assert engine.sent[1]["a"].dtype == torch.bfloat16
    assert engine.sent[1]["a"].tolist() == [1.0, 1.0]
    sender.close()
    assert engine.closed


def test_a_broken_sync_connects_anew(cluster: None, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    receiver: Any = Receiver.remote()  # type: ignore[attr-defined]
    sender = Sender("nccl", lambda: iter(WEIGHTS.items()), 0, Receivers(1, 1, partial(_receive, [receiver])))
    monkeypatch.setattr(FakeEngine, "fails", True)
    with pytest.raises(RuntimeError, match="the broadcast broke"):
        sender.send(1, ("127.0.0.1", 1234))
    monkeypatch.setattr(FakeEngine, "fails", False)
    sender.send(1, ("127.0.0.1", 1234))
    assert [engine.closed for engine in engines] == [True, False]
