"""The generator is asked at `base`: what it refuses or computes otherwise is refused before anything is trained."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.message_texts import Messages
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.health import WorkhorseError
from xray_runtime.cluster.protocols import Ready
from xray_runtime.data.batch import ReplyBatch, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.layouts import GeneratorConfig
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.base.config import HubBase
from xray_runtime.methods.base.generator_trial import check_sampled
from xray_runtime.models.family import family_of

REPLY = [7, 30, 11]


@pytest.fixture
def out(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    """A small model of a family that was never tried."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"initializer_range": 0.3}  # so that attention matters
    config = transformers.HeliumConfig(
        **sizes, num_key_value_heads=2, head_dim=16, vocab_size=300, max_position_embeddings=32, pad_token_id=0
    )
    torch.manual_seed(4)
    transformers.HeliumForCausalLM(config).save_pretrained(tmp_path / "out")
    return tmp_path / "out"


class Generator:
    """Answers with `REPLY`, and with log-probabilities of transformers that are `off_by` too high; an update leaves the
    weight `keeps` as it was."""

    def __init__(self, directory: Path, off_by: float, keeps: str | None = None) -> None:
        self._lm = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._off_by, self._keeps = off_by, keeps
        self.generate = SimpleNamespace(remote=self._generate)
        self.load_checkpoint = SimpleNamespace(remote=self._load)

    def _load(self, directory: Path, version: int) -> Ready[None]:
        other = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        weights = other.state_dict()
        if self._keeps is not None:
            weights[self._keeps] = self._lm.get_parameter(self._keeps).data
        self._lm.load_state_dict(weights)
        return Ready(None)

    def _generate(self, rows: TextBatch, sampling: Sampling, version: int) -> Ready[TextBatch]:
        found = []
        for prompt in rows.input_ids:
            with torch.no_grad():
                logits = self._lm(input_ids=torch.tensor([[*prompt.tolist(), *REPLY]])).logits[0]
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(REPLY)[:, None])[:, 0]
            found.append(logprobs.numpy() + np.float32(self._off_by))
        count = len(found)
        return Ready(ReplyBatch(response_ids=Ragged.of([REPLY] * count), rollout_logprobs=Ragged.of(found, np.float32)))


Opened = Callable[[dict[str, Any]], Any]


def trial(out: Path, open_models: Opened, **generator: Any) -> None:
    config = HubBase(model="org/model", generator=GeneratorConfig(**generator))
    stage: Any = SimpleNamespace(
        name="base", seed=7, config=config, runtime=RuntimeConfig(device="cpu"), open_models=open_models
    )
    check_sampled(stage, out, (1,), 0)


def opening(off_by: float = 0.0, error: Exception | None = None, keeps: str | None = None) -> Opened:
    @contextlib.contextmanager
    def open_models(specs: dict[str, GeneratorSpec]) -> Iterator[dict[str, Any]]:
        assert specs["generator"].max_length == 32
        if error is not None:
            raise error
        yield {"generator": Generator(specs["generator"].directory, off_by, keeps)}

    return open_models


def test_a_generator_that_computes_the_model_passes(out: Path) -> None:
    before = {path: path.read_bytes() for path in out.iterdir()}
    trial(out, opening(1e-6))
    assert {path: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    ("off_by", "error"),
    [
        (0.02, None),
        (float("nan"), None),
        (0.0, AssertionError("Chunked prefill is required\nfor mamba")),
        (0.0, ValueError("Model architectures ['Own'] are not supported")),
        (0.0, NotImplementedError()),
    ],
)
def test_a_generator_that_does_not_is_refused_in_one_line(
    out: Path, off_by: float, error: Exception | None, message_texts: Messages
) -> None:
    with message_texts.raises(ValueError):
        trial(out, opening(off_by, error))


def test_a_generator_that_leaves_a_weight_out_of_an_update_is_refused(out: Path) -> None:
    """Whichever it is: also norms, and matrices before a norm, which a factor would not show."""
    names = [name for name, _ in transformers.AutoModelForCausalLM.from_pretrained(out).named_parameters()]
    assert len(names) == 12
    for name in names:
        with pytest.raises(ValueError, match=r"after an update of its weights its log-probabilities differ from"):
            trial(out, opening(1e-6, keeps=name))


@pytest.mark.parametrize("error", [WorkhorseError("died"), MemoryError("out of memory")])
def test_errors_that_say_nothing_about_the_model_pass(out: Path, error: Exception) -> None:
    with pytest.raises(type(error)):
        trial(out, opening(error=error))


def test_transformers_generator_is_tried_on_an_unknown_family(out: Path) -> None:
    """Its padding changes the states of some models (RecurrentGemma)."""
    trial(out, opening(1e-6), engine="transformers")
    with pytest.raises(ValueError, match=r"transformers is not allowed .*0\.02 nats .*engine to 'deepspeed'$"):
        trial(out, opening(0.02), engine="transformers")


def test_known_families_cost_nothing(out: Path) -> None:
    def never(specs: Any) -> Any:
        pytest.fail("opened")

    content = json.loads((out / "config.json").read_text())
    for family in ("llama", "qwen3_moe"):
        assert "vllm" in family_of(family).tried
        (out / "config.json").write_text(json.dumps(content | {"model_type": family}))
        trial(out, never)
        trial(out, never, engine="transformers")
