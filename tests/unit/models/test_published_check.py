"""A published model is the trained one: each difference between files and trainer is found before signing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.message_texts import Messages
from tests.unit.conftest import TINY
from xray_runtime.models import published_check
from xray_runtime.models.causal_lm import copy_model, fresh_llama, load_model, save_model
from xray_runtime.models.published_check import PublishedError, check_published, tried_ids
from xray_runtime.models.trial import own_logprobs
from xray_runtime.models.weight_files import HEAD_PREFIX, overwrite, tensor_digest

EMBEDDING = "model.embed_tokens.weight"
NORM, UP, HEAD = "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "value/head.safetensors"
FILE = "model.safetensors"


@pytest.fixture
def source(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    save_model(fresh_llama(TINY, tiny_tokenizer, seed=2), tiny_tokenizer, tmp_path / "source")
    return tmp_path / "source"


class Published:
    """A checkpoint in which one layer and a scalar head were trained, and what its trainer says."""

    def __init__(self, source: Path, out: Path) -> None:
        self.source, self.out = source, out
        copy_model(source, out)
        trained = load_file(source / FILE)[UP] * 3.0
        self.written = overwrite(out, [(UP, trained)], 0, 1)
        head = {"weight": torch.arange(32.0)[None], "bias": torch.ones(1)}
        (out / HEAD).parent.mkdir()
        save_file(head, out / HEAD)
        self.written |= {HEAD_PREFIX + name: tensor_digest(tensor) for name, tensor in head.items()}
        rows = tried_ids(source)
        ids, lengths = torch.tensor([i for row in rows for i in row]), torch.tensor([len(row) for row in rows])
        self.logprobs = own_logprobs(load_model(out).eval(), ids, lengths)[0].tolist()

    def check(self, precision: str = "float32") -> None:
        check_published(self.out, self.source, self.written, (precision, self.logprobs), HEAD)

    def change(self, task: Callable[[dict[str, torch.Tensor]], object], file: str = FILE) -> None:
        weights = load_file(self.out / file)
        task(weights)
        save_file(weights, self.out / file, metadata={"format": "pt"})


@pytest.fixture
def made(source: Path, tmp_path: Path) -> Published:
    return Published(source, tmp_path / "out")


def test_an_intact_model_passes(made: Published) -> None:
    assert len(made.logprobs) == 12
    made.check()


def untied(made: Published) -> None:
    """A config that says what the trainer did not do."""
    path = made.out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))


def off(amount: float) -> Callable[[Published], None]:
    def change(made: Published) -> None:
        made.logprobs = [logprob + amount for logprob in made.logprobs]

    return change


def rotated(made: Published) -> None:
    """The same tensors, computed otherwise."""
    path = made.out / "config.json"
    rope = {"rope_type": "default", "rope_theta": 3.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": rope, "rms_norm_eps": 10.0}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m.change(lambda w: w.update({UP: w[UP] + 1e-3})),
        lambda m: m.change(lambda w: w.update({NORM: w[NORM] * 2})),
        lambda m: m.change(lambda w: w.update({"lm_head.weight": w[EMBEDDING] * 2})),
        lambda m: m.change(lambda w: w.update({NORM: torch.zeros(3)})),
        lambda m: m.change(lambda w: w.update({"mtp.fc.weight": torch.zeros(3)})),
        lambda m: m.change(lambda w: w.pop(NORM)),
        lambda m: m.change(lambda w: w.update(bias=w["bias"] + 1), HEAD),
        lambda m: m.written.update({"model.layers.7.weight": "0"}),
        untied,
        off(0.01),
        lambda m: m.logprobs.clear(),
        rotated,
    ],
    ids=[
        "trained",
        "frozen",
        "old head",
        "shape",
        "unknown",
        "lost",
        "scalar head",
        "not written",
        "untied",
        "log-probabilities",
        "no answer",
        "another function",
    ],
)
def test_a_model_that_differs_is_not_signed(
    made: Published, damage: Callable[[Published], object], message_texts: Messages
) -> None:
    damage(made)
    with message_texts.raises(PublishedError):
        made.check()


def test_bfloat16_passes_may_round(made: Published) -> None:
    off(0.05)(made)
    made.check("bfloat16")
    off(0.3)(made)
    with pytest.raises(PublishedError, match=r"differ by 0\.35 nats"):
        made.check("bfloat16")


def test_where_memory_is_short_tensors_are_compared_alone(made: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_check, "fits", lambda directory: False)
    monkeypatch.setattr(published_check, "load_reported", lambda *_, **__: pytest.fail("loaded"))
    made.check()
    made.change(lambda weights: weights.update({NORM: weights[NORM] * 2}))
    with pytest.raises(PublishedError, match=r"model\.norm\.weight has another value"):
        made.check()
