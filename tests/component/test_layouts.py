"""Every layout trains the same model: small forms of `benchmarks.layouts`, and models that change layout midway."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ray
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.layouts import (
    CONFIG,
    LayoutRun,
    collect,
    differences,
    global_batches,
    make_model,
    run_layout,
    spec_of,
    updates,
)
from benchmarks.ranks import run_ranks
from tests.component.layouts import last_line, part, same, short_of
from tests.component.processes import open_models
from tests.message_texts import Messages
from xray_runtime.algorithms import logprobs
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.micro_batches import as_tensors
from xray_runtime.cluster.model_spec import BranchSpec, ModelSpec
from xray_runtime.cluster.types import RankInfo
from xray_runtime.data.batch import PairBatch, StepTotals, TextBatch
from xray_runtime.engines.layouts import EngineConfig
from xray_runtime.engines.shard_loading import Weights, load_shard, skeleton_of
from xray_runtime.engines.sync import object_store
from xray_runtime.engines.sync.object_store import unpack
from xray_runtime.engines.sync.shared_memory import SharedReader
from xray_runtime.engines.trainers.deepspeed.build import can_split
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.methods.reward_model.config import RewardConfig
from xray_runtime.models import heads
from xray_runtime.models.causal_lm import load_model, skeleton
from xray_runtime.models.heads import Branch, HeadedLM
from xray_runtime.models.reward_objective import RewardObjective

NUM_UPDATES = 4
ZERO_3 = {"zero_stage": 3, "num_workhorses": 2}
TP = {"tensor_parallel": 2, "num_workhorses": 2}
PP = {"pipeline_parallel": 2, "num_workhorses": 2}
TP_PP = {"tensor_parallel": 2, "pipeline_parallel": 2, "num_workhorses": 4, "zero_stage": 1}
PP_DP = PP | {"num_workhorses": 4, "zero_stage": 1}
ALL = TP_PP | {"num_workhorses": 8, "zero_stage": 2}
MEGATRON = {"library": "megatron", "tensor_parallel": 2, "num_workhorses": 2}
MEGATRON_DP = MEGATRON | {"num_workhorses": 4}
FSDP2 = {"library": "fsdp2", "num_workhorses": 2}
SP = {"sequence_parallel": 2, "num_workhorses": 2}
SP_DP = {"sequence_parallel": 2, "num_workhorses": 4}


@pytest.fixture(scope="module")
def batches(tiny_model: Path) -> list[TextBatch]:
    return global_batches(tiny_model, count=2, num_rows=9, group_size=3)


@pytest.fixture(scope="module")
def alone(tiny_model: Path, batches: list[TextBatch], tmp_path_factory: pytest.TempPathFactory) -> LayoutRun:
    run = run_layout(spec_of(tiny_model, {}), batches, NUM_UPDATES, tmp_path_factory.mktemp("logs"))
    before = load_file(tiny_model / "model.safetensors")
    moved = [np.linalg.norm(run.weights[n] - t.numpy()) / np.linalg.norm(t.numpy()) for n, t in before.items()]
    assert min(moved) > 1e-4  # every tensor learns, so a layout that leaves one out shows
    return run


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ZERO_3, id="ZeRO-3 × 2"),
        pytest.param(TP, id="TP 2", marks=pytest.mark.long),
        pytest.param(PP, id="PP 2", marks=pytest.mark.long),
        pytest.param(PP_DP, id="PP 2 × DP 2"),
        pytest.param(ALL, id="TP 2 × PP 2 × DP 2", marks=pytest.mark.long),
        pytest.param(MEGATRON_DP, id="Megatron TP 2 × DP 2", marks=pytest.mark.long),
        pytest.param(FSDP2, id="FSDP2 × 2", marks=pytest.mark.long),
        pytest.param(SP | FSDP2, id="SP 2, FSDP2", marks=pytest.mark.long),
        pytest.param(SP | {"zero_stage": 0}, id="SP 2, ZeRO-0", marks=pytest.mark.long),
        pytest.param(SP_DP | {"zero_stage": 1}, id="SP 2 × DP 2, ZeRO-1", marks=pytest.mark.long),
        pytest.param(SP_DP | {"zero_stage": 2}, id="SP 2 × DP 2, ZeRO-2", marks=pytest.mark.long),
        pytest.param(SP_DP | {"zero_stage": 3}, id="SP 2 × DP 2, ZeRO-3", marks=pytest.mark.long),
        pytest.param(
            SP_DP | {"library": "fsdp2", "activation_checkpointing": True}, id="SP 2 × DP 2, FSDP2, recomputing"
        ),
    ],
)
def test_the_layout_does_not_show(
    alone: LayoutRun, tiny_model: Path, batches: list[TextBatch], tmp_path: Path, layout: dict[str, Any]
) -> None:
    run = run_layout(spec_of(tiny_model, layout, 32), batches, NUM_UPDATES, tmp_path)
    same(run, alone)
    if layout is ALL:
        # Splitting divides what a rank holds.
        assert max(sum(rank.values()) for rank in run.held) < 0.55 * sum(alone.held[0].values())


def chunked(
    learner: Learner, deal: Callable[[TextBatch], TextBatch], batches: list[TextBatch], last: int, max_logits: int
) -> dict[str, Any]:
    """Updates with logits of so few tokens at a time that ranks need different numbers of chunks."""
    heads.chunked_logprobs_and_entropy = functools.partial(  # type: ignore[attr-defined]
        logprobs.chunked_logprobs_and_entropy, max_logits=max_logits
    )
    return updates(learner, deal, batches, 0, last)


def test_chunks_of_logits_do_not_show_where_the_output_layer_is_sharded(tmp_path: Path) -> None:
    """ZeRO-3 of a model whose tied embedding is over the 100,000 elements up to which a parameter stays whole."""
    model = make_model(tmp_path / "model")
    batches = global_batches(model, count=2, num_rows=9)
    # Four tokens of 320 logits at a time; in one process and all at once first.
    runs = [
        collect(spec, run_ranks(spec, tmp_path, chunked, batches, 3, max_logits))
        for spec, max_logits in (
            (spec_of(model, {}), 2**24),
            (spec_of(model, {}), 1280),
            (spec_of(model, ZERO_3, 64), 1280),
        )
    ]
    for run in runs[1:]:
        same(run, runs[0])


class _ReachedError(Exception):
    pass


class Loader(Learner):
    """Gets as far as to DeepSpeed, and tells by how much its memory had grown: at most, and what it holds then."""

    def build(self, spec: ModelSpec, rank_info: RankInfo) -> None:
        before, own = _memory("VmRSS"), _memory("RssAnon")

        def reached(*_: Any, **__: Any) -> None:
            self.grown = _memory("VmHWM") - before
            # Without pages of files that are mapped: how many of them are resident is the kernel's choice.
            self.held = _memory("RssAnon") - own
            raise _ReachedError

        with mock.patch("deepspeed.initialize", reached), suppress(_ReachedError):
            super().build(spec, rank_info)


def _memory(field: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def grown(loader: Loader, deal: Callable[[TextBatch], TextBatch]) -> int:
    return loader.grown


def held(loader: Loader, deal: Callable[[TextBatch], TextBatch]) -> int:
    return loader.held


@pytest.mark.parametrize("split", [pytest.param(PP, id="PP 2", marks=pytest.mark.long), pytest.param(TP, id="TP 2")])
def test_a_rank_loads_its_own_part_alone(tmp_path: Path, split: dict[str, int]) -> None:
    """201M parameters in 16 bits: 0.8 GB in float32, and half of that on each of two ranks."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 8}
    transformers.LlamaConfig(vocab_size=320, tie_word_embeddings=True, **sizes).save_pretrained(tmp_path)
    weights = {
        name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in skeleton(str(tmp_path)).named_parameters()
    }
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    def fullest(layout: dict[str, int]) -> int:
        return max(run_ranks(spec_of(tmp_path, layout), tmp_path, grown, kind=Loader))

    whole = fullest({})
    assert 4 * 201e6 < whole < 1.2 * 4 * 201e6
    assert fullest(split) < 0.6 * whole


def with_other_top(source: Path, directory: Path, layer: int) -> Path:
    """A copy of a checkpoint in which this layer and the final norm are others."""
    shutil.copytree(source, directory)
    weights = load_file(directory / "model.safetensors")
    changed = {n: t * 1.5 for n, t in weights.items() if n.startswith((f"model.layers.{layer}.", "model.norm."))}
    save_file(weights | changed, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_branches_read_their_own_layers_from_their_own_files(tiny_model: Path, tmp_path: Path) -> None:
    other = with_other_top(tiny_model, tmp_path / "other", 1)
    branch, lm = BranchSpec(other).load("reference"), skeleton_of(tiny_model)
    assert all(p.is_meta for p in (*branch.parameters(), *lm.parameters()))
    module = HeadedLM(lm, trainable_layers=1, branches=[branch])
    load_shard(module, Weights(module, tiny_model), torch.device("cpu"))
    whole = HeadedLM(load_model(tiny_model), trainable_layers=1, branches=[Branch("reference", load_model(other))])
    found, expected = module.state_dict(), whole.state_dict()
    assert found.keys() == expected.keys()
    assert len([name for name in found if name.startswith("branches.0.layers.0.")]) > 5
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(found["branches.0.norm.weight"], found["lm.model.norm.weight"])


def branched(model: Path, branch: Path, layout: dict[str, int], trainable: int = 1) -> ModelSpec:
    spec = spec_of(model, layout)
    return replace(spec, trainable_layers=trainable, branches={"reference": BranchSpec(branch)})


@pytest.mark.parametrize(
    "layout",
    [pytest.param({}, id="1 process", marks=pytest.mark.long), pytest.param(ZERO_3, id="ZeRO-3 × 2")],
)
def test_a_branch_above_another_trunk_is_refused(
    tiny_model: Path, tmp_path: Path, layout: dict[str, int], message_texts: Messages
) -> None:
    """Ranks divide the comparison, so one of them finds it."""
    other = with_other_top(tiny_model, tmp_path / "other", 0)
    with pytest.raises(RuntimeError) as caught:
        run_ranks(branched(tiny_model, other, layout), tmp_path, grown, kind=Loader)
    message_texts.check(last_line(caught.value))


def save_38_million(directory: Path) -> int:
    """Save a model of 38M parameters in float32; returns the bytes of its weights."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 9, "num_attention_heads": 8}
    config = transformers.LlamaConfig(vocab_size=320, tie_word_embeddings=True, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return (directory / "model.safetensors").stat().st_size


def returned(learner: Learner, deal: Callable[[TextBatch], TextBatch], batches: list[TextBatch]) -> int:
    """Bytes of memory that the process returns to the system when a trained model is unloaded."""
    updates(learner, deal, batches, 0, 1)
    before = _memory("RssAnon")
    learner.unload()
    return before - _memory("RssAnon")


def test_the_memory_of_a_trained_model_is_returned(batches: list[TextBatch], tmp_path: Path) -> None:
    """The C library would keep it, and a Workhorse that waits for the next stage with it."""
    size = save_38_million(tmp_path / "model")
    [bytes_returned] = run_ranks(spec_of(tmp_path / "model", {}), tmp_path, returned, batches)
    assert bytes_returned > 0.9 * 3 * size  # weights and AdamW's two moments


@pytest.mark.parametrize(
    "layout", [pytest.param({}, id="1 process", marks=pytest.mark.long), pytest.param(ZERO_3, id="ZeRO-3 × 2")]
)
def test_a_branch_takes_the_memory_of_its_layers(tmp_path: Path, layout: dict[str, int]) -> None:
    """38M parameters, 151 MB in float32, of which a branch holds a ninth; each rank of ZeRO-3 its share of that."""
    size = save_38_million(tmp_path / "model")
    other = with_other_top(tmp_path / "model", tmp_path / "other", 8)
    plain = max(run_ranks(spec_of(tmp_path / "model", layout), tmp_path, held, kind=Loader))
    spec = branched(tmp_path / "model", other, layout)
    assert max(run_ranks(spec, tmp_path, held, kind=Loader)) - plain < 0.25 * size


def loaded(learner: Learner, deal: Callable[[TextBatch], TextBatch]) -> dict[str, np.ndarray]:
    assert learner.engine is not None
    weights = {name: t.detach().numpy().copy() for name, t in learner.engine.weights()}
    return weights if learner.engine.turn[0] == 0 else {}


@pytest.mark.parametrize(
    "tied", [pytest.param(True, id="tied"), pytest.param(False, id="untied", marks=pytest.mark.long)]
)
def test_the_parts_are_the_whole(tiny_model: Path, tmp_path: Path, tied: bool) -> None:
    lm = load_model(tiny_model)
    lm.config.tie_word_embeddings = tied
    if not tied:
        lm.lm_head.weight = torch.nn.Parameter(2.0 * lm.lm_head.weight.detach())
    lm.half().save_pretrained(tmp_path / "half")  # read as float32, whatever the file holds
    ranks = run_ranks(spec_of(tmp_path / "half", TP_PP), tmp_path, loaded)
    found = {name: tensor for rank in ranks for name, tensor in rank.items() if not name.startswith("scalar.")}
    expected = load_file(tmp_path / "half" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert ("lm_head.weight" in found) is not tied
    assert all(np.array_equal(found[name], tensor.float().numpy()) for name, tensor in expected.items())


EXPORTED = {
    "1 process": {},
    "ZeRO-3 × 2": ZERO_3,
    "ZeRO-1 × 2": {"zero_stage": 1, "num_workhorses": 2},
    "TP 2": TP,
    "PP 2": PP,
    "TP 2 × PP 2": TP_PP,
    "Megatron TP 2": MEGATRON,
    "FSDP2 × 2": FSDP2,
    "SP 2": SP,
}


def exported(learner: Learner, deal: Callable[[TextBatch], TextBatch]) -> dict[str, Any]:
    """A rank's share of the weights, and what one rank of its stage used to send: all of them."""
    object_store.BUCKET_BYTES = 2**14
    update, reader = learner.export_weights(1, True), SharedReader()
    sent = {name: t.numpy().copy() for bucket in update.buckets for name, t in unpack(bucket, reader)}
    return {"sent": sent, "whole": {name: t.numpy().copy() for name, t in learner._weights(head=False)}}


@pytest.mark.parametrize("layout", short_of(EXPORTED, "ZeRO-3 × 2"))
def test_every_rank_sends_its_share_of_the_weights(tiny_model: Path, tmp_path: Path, layout: str) -> None:
    spec = spec_of(tiny_model, EXPORTED[layout])
    ranks = run_ranks(spec, tmp_path, exported)
    sent = [name for rank in ranks for name in rank["sent"]]
    assert len(sent) == len(set(sent))
    expected = load_file(tiny_model / "model.safetensors")
    assert set(sent) == expected.keys()
    largest = max(tensor.nbytes for tensor in expected.values())
    for rank in ranks:
        for name, tensor in rank["sent"].items():
            assert np.array_equal(tensor, rank["whole"][name])
            assert np.array_equal(tensor, expected[name].numpy())
        # Ranks of one stage hold the same names.
        stage = [other for other in ranks if other["whole"].keys() == rank["whole"].keys()]
        share = sum(tensor.nbytes for tensor in rank["whole"].values()) / len(stage)
        assert rank["sent"]
        assert sum(tensor.nbytes for tensor in rank["sent"].values()) <= share + largest


class Exporter(Learner):
    """Tells by how much its memory grows as it exports, shared memory included, and how much it packs."""

    def export_weights(self, version: int, shared: bool, dtype: str | None = None, merged: bool = True) -> Any:
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        update = super().export_weights(version, shared, dtype, merged)
        self.grown = _memory("VmHWM") - before
        return update


def packed_and_grown(learner: Exporter, deal: Callable[[TextBatch], TextBatch], bucket: int) -> tuple[int, int]:
    object_store.BUCKET_BYTES = bucket
    # The first one also makes what all later ones use; each takes memory of its own beside the one before.
    return [(learner.export_weights(version, True).num_bytes, learner.grown) for version in (1, 2)][1]


@pytest.mark.parametrize("layout", short_of(("1 process", "ZeRO-3 × 2", "TP 2", "PP 2"), "ZeRO-3 × 2"))
def test_an_export_takes_a_share_and_a_bucket(tmp_path: Path, layout: str) -> None:
    """38M parameters, 151 MB in float32."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 9, "num_attention_heads": 8}
    config = transformers.LlamaConfig(vocab_size=320, tie_word_embeddings=True, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    size, bucket, largest = (tmp_path / "model.safetensors").stat().st_size, 2**23, 4 * 512 * 2048
    ranks = run_ranks(spec_of(tmp_path, EXPORTED[layout]), tmp_path, packed_and_grown, bucket, kind=Exporter)
    share = size / len(ranks)
    for packed, grown in ranks:
        assert packed <= 1.1 * share + bucket
        # One tensor is whole on every rank at a time, and in pieces while it is put together.
        assert grown <= 1.1 * share + bucket + 3 * largest


def test_buffers_that_a_checkpoint_holds_are_read_too(tiny_model: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    save_file(weights | {"model.scale": torch.tensor([3.0])}, tmp_path / "model.safetensors")
    lm: Any = skeleton(str(tiny_model))
    lm.model.register_buffer("scale", torch.zeros(1))
    module = HeadedLM(lm)
    load_shard(module, Weights(module, tmp_path), torch.device("cpu"))
    assert lm.model.scale.tolist() == [3.0]
    assert torch.equal(lm.lm_head.weight, weights["model.embed_tokens.weight"])
    assert lm.lm_head.weight is lm.model.embed_tokens.weight


def test_a_checkpoint_in_several_files_is_read_tensor_by_tensor(
    tiny_model: Path, tmp_path: Path, message_texts: Messages
) -> None:
    lm: Any = load_model(tiny_model)
    lm.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    assert all(p.is_meta for p in skeleton_of(tmp_path / "shards").parameters())
    module = HeadedLM(skeleton_of(tmp_path / "shards"))
    load_shard(module, Weights(module, tmp_path / "shards"), torch.device("cpu"))
    assert all(torch.equal(p, q) for p, q in zip(module.lm.parameters(), lm.parameters(), strict=True))
    lacking = {n: t for n, t in load_file(tiny_model / "model.safetensors").items() if n != "model.norm.weight"}
    lm.config.save_pretrained(tmp_path)
    save_file(lacking, tmp_path / "model.safetensors", {"format": "pt"})
    with message_texts.raises(ValueError):
        skeleton_of(tmp_path)


PASSED_ON = {
    "ZeRO-3 on 2, Megatron TP 2, FSDP2 on 3, TP 2": [ZERO_3, MEGATRON, FSDP2 | {"num_workhorses": 3}, TP],
    "ZeRO-3 on 4, TP 2, Megatron TP 2, one process": [ZERO_3 | {"num_workhorses": 4}, TP, MEGATRON, {}],
    "PP 2, TP 2 × PP 2, ZeRO-2, ZeRO-3": [PP, TP_PP, {"zero_stage": 2, "num_workhorses": 2}, ZERO_3],
    "TP 2 × PP 2 × DP 2, ZeRO-3 on 2, one process": [ALL, ZERO_3, {}],
    "SP 2 × DP 2, ZeRO-0, SP 2 of ZeRO-3, one process": [SP_DP | {"zero_stage": 0}, SP | {"zero_stage": 3}, {}],
    "FSDP2 on 3, ZeRO-3 on 2, FSDP2 on 2, TP 2": [FSDP2 | {"num_workhorses": 3}, ZERO_3, FSDP2, TP],
}


@pytest.mark.parametrize("names", short_of(PASSED_ON, "ZeRO-3 on 2, Megatron TP 2, FSDP2 on 3, TP 2"))
def test_a_model_goes_on_under_another_layout(
    alone: LayoutRun, tiny_model: Path, batches: list[TextBatch], tmp_path: Path, names: str
) -> None:
    layouts = PASSED_ON[names]
    ends = np.linspace(0, NUM_UPDATES, len(layouts) + 1).astype(int).tolist()
    came, losses = None, []
    for number, layout in enumerate(layouts):
        spec, goes = spec_of(tiny_model, layout), tmp_path / str(number)
        ranks = run_ranks(spec, tmp_path, part, batches, range(ends[number], ends[number + 1]), came, goes)
        run = collect(spec, ranks)
        losses += run.losses.tolist()
        names = {name for file in goes.glob("*.safetensors") for name in load_file(file)}
        assert names == {f"{kind}/{n}" for kind in ("weight", "exp_avg", "exp_avg_sq") for n in alone.weights}
        came = goes
    np.testing.assert_allclose(losses, alone.losses, atol=1e-5 * np.abs(alone.losses).max())
    assert differences(LayoutRun(alone.losses, alone.norms, run.weights, [], 0.0), alone)[2] < 5e-5


# `test_options`, `test_fsdp2` and `test_megatron` say this of each engine, with options.
@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TP_PP, id="TP 2 × PP 2"),
        pytest.param(MEGATRON, id="Megatron TP 2"),
        pytest.param(FSDP2, id="FSDP2"),
        pytest.param(SP, id="SP 2"),
    ],
)
def test_going_on_under_the_same_layout_gives_the_same_bits(
    tiny_model: Path, batches: list[TextBatch], tmp_path: Path, layout: dict[str, Any]
) -> None:
    spec, place = spec_of(tiny_model, layout), tmp_path / "snapshot"
    whole = collect(spec, run_ranks(spec, tmp_path, part, batches, range(3), None, None))
    run_ranks(spec, tmp_path, part, batches, range(2), None, place)
    resumed = collect(spec, run_ranks(spec, tmp_path, part, batches, range(2, 3), place, None))
    assert resumed.losses.tolist() == whole.losses[2:].tolist()
    assert all(np.array_equal(resumed.weights[name], tensor) for name, tensor in whole.weights.items())


def pairs_learnt(learner: Learner, deal: Callable[[TextBatch], TextBatch], rows: TextBatch) -> dict[str, Any]:
    """Two steps of a reward model and its scores."""
    sums = [learner.train(deal(rows), StepTotals(rows=6.0), 1e-3) for _ in range(2)]
    scores = learner.score(deal(TextBatch(input_ids=rows.input_ids)))
    return {"losses": [s.get("loss", 0.0) for s in sums], "scores": scores.scores if len(scores) else None}


def test_a_reward_model_learns_pairs_in_any_layout(tiny_model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)

    def sequences(lengths: np.ndarray) -> list[list[int]]:
        return [rng.integers(5, 280, size=length).tolist() for length in lengths]

    prompts = sequences(rng.integers(2, 6, size=6))
    chosen, rejected = (TextBatch.of(prompts, sequences(rng.integers(3, 9, size=6))) for _ in range(2))
    rows = chosen.as_kind(PairBatch, rejected_ids=rejected.input_ids)

    def learnt(layout: dict[str, int]) -> dict[str, Any]:
        training = RewardConfig(engine=EngineConfig(micro_batch_tokens=64, **layout))
        spec = ModelSpec(tiny_model, RewardObjective(), training=training, new_head=True)
        return run_ranks(spec, tmp_path, pairs_learnt, rows)[-2 if "tensor_parallel" in layout else -1]

    expected, found = learnt({}), learnt(TP_PP)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    assert found["losses"][1] < found["losses"][0]
    # The head's bias cancels in a pair: its gradient is rounding noise, and Adam makes steps of it.
    centred = [run["scores"] - run["scores"].mean() for run in (found, expected)]
    np.testing.assert_allclose(*centred, atol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tensor_parallel": 4, "num_workhorses": 4}, id="TP 4", marks=pytest.mark.long),
        pytest.param({"pipeline_parallel": 3, "num_workhorses": 3}, id="PP 3"),
        pytest.param({"sequence_parallel": 4, "num_workhorses": 4}, id="SP 4", marks=pytest.mark.long),
    ],
)
def test_a_split_the_model_does_not_allow_is_refused(
    tiny_model: Path, tmp_path: Path, layout: dict[str, int], message_texts: Messages
) -> None:
    with pytest.raises(RuntimeError) as caught:
        run_ranks(spec_of(tiny_model, layout), tmp_path, part, [], range(0), None, None)
    message_texts.check(last_line(caught.value))


def test_allowed_splits_are_known_from_the_config(tiny_model: Path, tmp_path: Path) -> None:
    """For the planner: Llama's plan is AutoTP's too; GPT-NeoX names its parts otherwise; GPT-2 has neither."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    transformers.GPTNeoXConfig(**sizes).save_pretrained(tmp_path / "neox")
    transformers.GPT2Config(**sizes).save_pretrained(tmp_path / "gpt2")
    found = [can_split(str(model)) for model in (tiny_model, tmp_path / "neox", tmp_path / "gpt2")]
    assert found == [(True, True), (True, True), (False, False)]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(PP, id="PP 2"),
        pytest.param(ZERO_3, id="ZeRO-3 × 2", marks=pytest.mark.long),
        pytest.param(SP, id="SP 2", marks=pytest.mark.long),
    ],
)
def test_parts_are_one_whole_model(
    cluster: None, tiny_model: Path, batches: list[TextBatch], tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Over Ray: scores of all rows in order, one learning step, and the same weights exported and saved."""
    rows = TextBatch.of_columns(batches[0].pick("input_ids", "prompt_lengths"))
    module = HeadedLM(load_model(tiny_model), scalar_head=True).eval()
    with torch.no_grad():
        expected = PPOObjective(CONFIG).score(module, as_tensors(rows)).logprobs.values
    runtime = RuntimeConfig(threads=1, device="cpu")
    with open_models(runtime, tmp_path / "logs", {"policy": spec_of(tiny_model, layout, 32)}) as models:
        policy = models["policy"]
        scores = ray.get(policy.score.remote(rows))
        stats = ray.get(policy.train.remote(batches[0], StepTotals(tokens=60.0), 1e-3))
        ray.get(policy.save.remote(tmp_path / "out", "head/head.safetensors"))
        update = ray.get(policy.export_weights.remote(1))
        exported = {name: t.clone() for bucket in update.buckets for name, t in unpack(bucket)}
    np.testing.assert_allclose(scores.logprobs.values, expected, atol=1e-5)
    assert stats["policy_loss"] != 0.0
    saved, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(tiny_model / "model.safetensors")
    assert saved.keys() == before.keys()
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    assert not any(torch.equal(before[name], tensor) for name, tensor in saved.items())
    assert load_file(tmp_path / "out" / "head" / "head.safetensors").keys() == {"weight", "bias"}
