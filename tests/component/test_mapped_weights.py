"""Frozen models on one machine hold their weights once: on the mapped pages of a checkpoint's files."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.message_texts import Messages
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.engine import MicroBatch
from xray_runtime.engines.layouts import FrozenConfig
from xray_runtime.engines.shard_loading import Weights, load_shard, skeleton_of
from xray_runtime.engines.trainer import build_scorer
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import ReferenceObjective
from xray_runtime.models.tensor_file import TensorFile

CPU = torch.device("cpu")
MIB = 2**20
ROWS = TextBatch(
    input_ids=Ragged(torch.tensor([5, 9, 7, 42, 1]), torch.tensor([0, 5])), prompt_lengths=torch.tensor([2])
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of some 70 MB, most of it one embedding."""
    config = transformers.LlamaConfig(
        vocab_size=32_768,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    directory = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def scorer_of(directory: Path, precision: Any = "float32") -> Any:
    return build_scorer(HeadedLM(skeleton_of(directory)), FrozenConfig(precision=precision), directory, CPU)


def score(scorer: Any) -> torch.Tensor:
    with torch.no_grad():
        [(_, scores)] = scorer.evaluate(ReferenceObjective(1.0).score, [MicroBatch(0, [0], ROWS)])
    return ref_logprobs(scores)


def ref_logprobs(scores: Any) -> torch.Tensor:
    logprobs: torch.Tensor = scores.ref_logprobs.values
    return logprobs


def file_at(address: int) -> str:
    """The file whose mapping this process has at `address`; empty for memory of its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(each, 16) for each in line.split()[0].split("-"))
        if low <= address < high:
            return " ".join(line.split()[5:])
    raise AssertionError(f"nothing is mapped at {address:x}")


def private_bytes() -> int:
    """Memory that this process shares with no file."""
    [found] = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) * 1024


def test_a_frozen_model_is_on_the_pages_of_its_checkpoint(directory: Path) -> None:
    scorer_of(directory)  # what every first model takes
    before = private_bytes()
    scorer = scorer_of(directory)
    parameters = dict(scorer.module.named_parameters())
    assert sum(p.numel() * 4 for p in parameters.values()) > 64 * MIB
    assert private_bytes() - before < 8 * MIB
    assert {file_at(p.data_ptr()) for p in parameters.values()} == {str(directory / "model.safetensors")}
    assert scorer.module.lm.lm_head.weight is scorer.module.lm.model.embed_tokens.weight
    copied = HeadedLM(skeleton_of(directory))
    load_shard(copied, Weights(copied, directory), CPU)
    assert torch.equal(score(scorer), ref_logprobs(ReferenceObjective(1.0).score(copied, ROWS)))


def test_trained_or_converted_weights_are_copies(directory: Path) -> None:
    """An optimizer writes in place: neither the file nor a frozen model beside it may change."""
    frozen, trained = scorer_of(directory), HeadedLM(skeleton_of(directory))
    content = (directory / "model.safetensors").read_bytes()
    load_shard(trained, Weights(trained, directory), CPU)
    assert {file_at(p.data_ptr()) for p in trained.parameters()} & {str(directory / "model.safetensors")} == set()
    assert not any(p.requires_grad for p in frozen.module.parameters())
    before = score(frozen)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(1.0)
    assert torch.equal(score(frozen), before)
    half = scorer_of(directory, "bfloat16")
    mapped = str(directory / "model.safetensors")
    assert not any(file_at(p.data_ptr()) == mapped for p in half.module.parameters())
    # A write to mapped weights by mistake reaches neither the file nor other readers.
    with torch.no_grad():
        frozen.module.lm.model.embed_tokens.weight.zero_()
    assert (directory / "model.safetensors").read_bytes() == content
    assert torch.equal(score(scorer_of(directory)), before)


def test_a_checkpoint_that_is_replaced_changes_no_mapped_model(directory: Path, tmp_path: Path) -> None:
    """A file in another's place has another inode, also where it has the same name."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    shutil.copytree(directory, mine)
    shutil.copytree(directory, other)
    with TensorFile(other / "model.safetensors") as file:
        file.write("model.norm.weight", torch.full((512,), 3.0))
    scorer = scorer_of(mine)
    before = score(scorer)
    os.replace(other / "model.safetensors", mine / "model.safetensors")
    assert torch.equal(score(scorer), before)
    assert not torch.equal(score(scorer_of(mine)), before)


def test_a_write_to_a_mapped_file_ends_the_stage(directory: Path, tmp_path: Path, message_texts: Messages) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    scorer, name = scorer_of(tmp_path), "model.norm.weight"
    score(scorer)
    changed = load_file(tmp_path / "model.safetensors")[name] * 2.0
    with TensorFile(tmp_path / "model.safetensors") as file:
        file.write(name, changed)
    with message_texts.raises(RuntimeError):
        score(scorer)
