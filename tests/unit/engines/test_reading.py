"""When a generator compares a checkpoint that it read with what its trainer published."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.message_texts import Messages
from tests.unit.conftest import TINY
from xray_runtime.engines import generation
from xray_runtime.engines.generators.vllm import VLLMConfig
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import EngineRank, Reply, Sampler, Sampling
from xray_runtime.engines.sync.object_store import pack
from xray_runtime.engines.sync.shared_memory import SharedWriter
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.models.causal_lm import fresh_llama, save_model
from xray_runtime.models.published_check import PublishedError, write_tried

SAMPLING = Sampling(max_new_tokens=1, temperature=1.0, stop_token_ids=(1,), pad_token_id=0)
LOGPROBS = [-float(n) for n in range(12)]


class Recorder(Sampler):
    """Notes when it is asked; its answers are those of `LOGPROBS`, off by `off`."""

    def __init__(self, off: float) -> None:
        self.off, self.calls = off, list[str]()

    def logprobs(self, rows: list[list[int]]) -> list[float]:
        self.calls.append("compare")
        assert [len(row) for row in rows] == [8, 6]
        return [logprob + self.off for logprob in LOGPROBS]

    def sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Reply]:
        self.calls.append("sample")
        return [Reply([5], [-1.0]) for _ in prompts]

    def write(self, tensors: Any, version: int) -> None:
        self.calls.append("write")
        list(tensors)


@pytest.fixture
def sft(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    save_model(fresh_llama(TINY, tiny_tokenizer, seed=2), tiny_tokenizer, tmp_path / "sft-1")
    write_tried(tmp_path / "sft-1", "float32", LOGPROBS)
    return tmp_path / "sft-1"


def opened(
    sft: Path,
    monkeypatch: pytest.MonkeyPatch,
    off: float = 1e-6,
    sleeps: bool = False,
    config: GeneratorConfig | None = None,
) -> tuple[generation.Generation, Recorder]:
    sampler = Recorder(off)
    monkeypatch.setattr(generation, "generator", lambda name: SimpleNamespace(sampler=lambda *_: sampler))
    runtime = RuntimeConfig(device="cpu").model_copy(update={"generator_sleeps": sleeps})
    engine = generation.Generation(sft, 64, config or GeneratorConfig(), runtime, EngineRank("cpu"))
    return engine, sampler


def test_it_compares_as_it_reads(sft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sampler = opened(sft, monkeypatch)
    assert (sampler.calls, engine.readings) == (["compare"], {"sft-1": pytest.approx(1e-6)})
    engine.generate([[5]], [0], SAMPLING, 0)
    engine.restart(sft, 3)
    assert sampler.calls == ["compare", "sample", "write", "compare"]


def test_one_that_takes_turns_waits_for_its_own(sft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not wake up beside models that are being loaded."""
    engine, sampler = opened(sft, monkeypatch, sleeps=True)
    assert (sampler.calls, engine.readings) == ([], {})
    for _ in range(2):
        engine.generate([[5]], [0], SAMPLING, 0)
    assert sampler.calls == ["compare", "sample", "sample"]


def test_weights_of_an_update_are_not_the_checkpoints(sft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sampler = opened(sft, monkeypatch, sleeps=True)
    memory = SharedWriter()  # which lasts as long as this
    engine.weights.load(pack([("model.norm.weight", torch.zeros(32))], 1, memory))
    engine.generate([[5]], [0], SAMPLING, 1)
    assert sampler.calls == ["write", "sample"]


@pytest.mark.parametrize(
    ("off", "precision", "is_refused"), [(0.002, "float32", True), (0.002, "bfloat16", False), (0.3, "bfloat16", True)]
)
def test_another_model_is_refused(
    sft: Path, monkeypatch: pytest.MonkeyPatch, off: float, precision: str, is_refused: bool, message_texts: Messages
) -> None:
    write_tried(sft, precision, LOGPROBS)
    if not is_refused:
        assert opened(sft, monkeypatch, off)[0].readings == {"sft-1": pytest.approx(off)}
        return
    with message_texts.raises(PublishedError):
        opened(sft, monkeypatch, off)


def test_rounded_weights_and_models_of_others_are_not_compared(sft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sampler = opened(sft, monkeypatch, 9.0, config=VLLMConfig(quantization="fp8"))
    assert (sampler.calls, engine.readings) == ([], {})
    (sft / "logprobs.json").unlink()
    assert opened(sft, monkeypatch, 9.0)[0].readings == {}
