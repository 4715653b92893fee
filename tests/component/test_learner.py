"""Learners on real Ray and DeepSpeed: the split over Workhorses and micro-batches must not show in the result."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from tests.component.models import RUNTIME, text
from tests.component.processes import open_models, pids
from xray_runtime.cluster.health import WorkhorseError
from xray_runtime.cluster.learner import Learner
from xray_runtime.cluster.model_spec import BranchSpec, ModelSpec
from xray_runtime.cluster.types import RankInfo
from xray_runtime.cluster.workhorse import Workhorse
from xray_runtime.data.batch import PolicyBatch, Scores, StepTotals, TextBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.layouts import EngineConfig, FrozenConfig
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.methods.ppo.config import PPOStageConfig
from xray_runtime.methods.ppo.objectives import PPOObjective
from xray_runtime.methods.sft.config import SFTConfig
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.objectives import Component, ReferenceObjective, SFTObjective, Terms
from xray_runtime.models.reward_objective import RewardObjective

NUM_STEPS = 6


def train(model: Path, logs: Path, out: Path, engine: EngineConfig) -> tuple[list[float], list[float], dict[str, Any]]:
    """(losses, gradient norms, final weights) of a few SFT steps."""
    config = SFTConfig(lr=1e-2, grad_clip=0.5, engine=engine)
    losses, norms = [], []
    with open_models(RUNTIME, logs, {"policy": ModelSpec(model, SFTObjective(), training=config)}) as models:
        for step in range(NUM_STEPS):
            rows = text(seed=step % 2)
            tokens = float(rows.num_response_tokens())
            stats = ray.get(models["policy"].train.remote(rows, StepTotals(tokens=tokens), 1e-2))
            losses.append(stats["nll"] / tokens)
            norms.append(stats["grad_norm"])
        ray.get(models["policy"].save.remote(out))
    return losses, norms, load_file(out / "model.safetensors")


@pytest.fixture(scope="module")
def alone(cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("alone")
    return train(tiny_model, root / "logs", root / "out", EngineConfig())


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(EngineConfig(micro_batch_tokens=16), id="small micro-batches"),
        # `test_layouts` says it of two ranks without Ray.
        pytest.param(
            DeepSpeedConfig(num_workhorses=2, zero_stage=3), id="2 Workhorses, ZeRO-3", marks=pytest.mark.long
        ),
    ],
)
def test_the_split_does_not_show(alone: Any, tiny_model: Path, tmp_path: Path, engine: EngineConfig) -> None:
    losses, norms, weights = train(tiny_model, tmp_path / "logs", tmp_path / "out", engine)
    # float32 sums in another order; Adam's division can enlarge that where gradients are near zero.
    np.testing.assert_allclose(losses, alone[0], rtol=2e-5)
    np.testing.assert_allclose(norms, alone[1], rtol=1e-4)
    assert losses[-2] < losses[0]  # the same rows, four steps later
    assert weights.keys() == alone[2].keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, alone[2][name], rtol=1e-3, atol=2e-4)


def test_the_same_run_gives_the_same_bytes(alone: Any, tiny_model: Path, tmp_path: Path) -> None:
    _, _, weights = train(tiny_model, tmp_path / "logs", tmp_path / "out", EngineConfig())
    assert all(torch.equal(tensor, alone[2][name]) for name, tensor in weights.items())


def test_scores_keep_the_order_of_rows(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rows = text(num_rows=7)
    spec = ModelSpec(tiny_model, ReferenceObjective(1.0), score_tokens=24)
    with open_models(RUNTIME, tmp_path, {"reference": spec}) as models:
        scores = ray.get(models["reference"].score.remote(rows)).ref_logprobs
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    for tokens, start, found in zip(rows.input_ids, rows.prompt_lengths, scores, strict=True):
        ids = torch.from_numpy(tokens)[None]
        logp = torch.log_softmax(lm(ids).logits[0], -1)
        expected = [float(logp[t - 1, ids[0, t]].detach()) for t in range(start, ids.shape[1])]
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=[] if name == "TP 2" else pytest.mark.long)
        for name, layout in {
            "DP 2": FrozenConfig(num_workhorses=2),
            "TP 2": FrozenConfig(num_workhorses=2, tensor_parallel=2),
            "ZeRO-3 on 2": FrozenConfig(num_workhorses=2, zero_stage=3),
            "ZeRO-3 on 2, bfloat16": FrozenConfig(num_workhorses=2, zero_stage=3, precision="bfloat16"),
            "FSDP2 on 2": FrozenConfig(num_workhorses=2, zero_stage=3, library="fsdp2"),
            "TP 2 × PP 2": FrozenConfig(num_workhorses=4, tensor_parallel=2, pipeline_parallel=2),
        }.items()
    ],
)
def test_a_frozen_model_scores_alike_however_it_is_spread(
    cluster: None, tiny_model: Path, tmp_path: Path, layout: FrozenConfig
) -> None:
    rows = text(num_rows=7)
    weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    save_file({"weight": weight, "bias": torch.ones(1)}, tmp_path / "head.safetensors")
    objectives = {
        "reference": (ReferenceObjective(1.0), None),
        "reward": (RewardObjective(), tmp_path / "head.safetensors"),
    }
    specs = {
        f"{role}{name}": ModelSpec(tiny_model, objective, head=head, score_tokens=24, frozen=frozen)
        for role, (objective, head) in objectives.items()
        for name, frozen in (("", layout), ("-alone", FrozenConfig()))
    }
    with open_models(RUNTIME, tmp_path, specs) as models:
        scores = {role: ray.get(model.score.remote(rows)) for role, model in models.items()}
    for role, found in (
        ("reference", lambda rows: rows.ref_logprobs.values),
        ("reward", lambda rows: rows.scores),
    ):
        difference = np.abs(found(scores[role]) - found(scores[f"{role}-alone"])).max()
        if layout.precision != "bfloat16":
            assert difference < 1e-5
        else:
            # Eight bits of every state.
            assert 1e-4 < difference < 0.1
        assert np.ptp(found(scores[role])) > 0.1


@pytest.mark.parametrize(
    "trainable",
    [
        pytest.param(1, id="the upper layer learns"),
        pytest.param(2, id="all but the embeddings learn", marks=pytest.mark.long),
    ],
)
def test_a_shared_trunk_scores_and_trains_like_the_whole(
    cluster: None, tiny_model: Path, tmp_path: Path, trainable: int
) -> None:
    """With the trunk cached the policy moves as with the trunk computed anew; the reference does not move."""
    config = PPOStageConfig(lr=1e-2)
    rows = text(num_rows=8).with_columns(id=np.arange(8))
    shared = ModelSpec(
        tiny_model,
        PPOObjective(config),
        training=config,
        new_head=True,
        trainable_layers=trainable,
        branches={"reference": BranchSpec(tiny_model)},
    )
    with open_models(RUNTIME, tmp_path, {"cached": shared, "fresh": shared}) as models:
        before = ray.get(models["cached"].score.remote(rows))
        np.testing.assert_array_equal(before.logprobs.values, before.ref_logprobs.values)
        ones = Ragged(np.ones_like(before.values.values), before.values.offsets)
        columns = {"old_logprobs": before.logprobs, "values": before.values}
        columns |= dict.fromkeys(("advantages", "weights", "returns"), ones)
        given = rows.as_kind(PolicyBatch, **columns)
        for index in ([0, 3, 5], [1, 2, 7]):
            batch = given.take(index)
            cached = ray.get(models["cached"].train.remote(batch, StepTotals(tokens=10.0), 1e-2))
            fresh = ray.get(models["fresh"].train.remote(batch.with_columns(id=None), StepTotals(tokens=10.0), 1e-2))
            assert cached == pytest.approx(fresh, rel=1e-5, abs=1e-6)
        after = ray.get(models["cached"].score.remote(rows))
    np.testing.assert_allclose(after.ref_logprobs.values, before.ref_logprobs.values, atol=1e-6)
    assert np.abs(after.logprobs.values - before.logprobs.values).max() > 1e-3


def test_a_failure_in_a_workhorse_shows_its_cause(cluster: None, tmp_path: Path, tiny_model: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    with (
        pytest.raises(Exception, match="broken") as caught,
        open_models(RUNTIME, tmp_path, {"policy": ModelSpec(broken, SFTObjective())}),
    ):
        pass
    assert "ActorDied" not in type(caught.value).__name__


def test_a_lost_workhorse_is_named_with_its_log(cluster: None, tmp_path: Path, tiny_model: Path) -> None:
    with open_models(RUNTIME, tmp_path / "logs", {"policy": ModelSpec(tiny_model, SFTObjective())}) as models:
        os.kill(pids(models["policy"])[0], signal.SIGKILL)
        with pytest.raises(
            WorkhorseError, match=r"Workhorse 0 of 1 of 'policy' \(.+, pid \d+\) died[\s\S]*policy-0\.log"
        ):
            ray.get(models["policy"].score.remote(text()))


@dataclass(frozen=True)
class ThreadsObjective(SFTObjective):
    """Supervised fine-tuning that also tells with how many threads it was computed."""

    def score(self, module: HeadedLM, rows: TextBatch[torch.Tensor]) -> Scores[torch.Tensor]:
        threads = torch.full((len(rows),), torch.get_num_threads())
        return super().score(module, rows).with_columns(threads=threads)

    def components(self, module: HeadedLM) -> Any:
        return (*super().components(module), CountedThreads())


class CountedThreads(Component[Any]):
    def coef(self, totals: StepTotals) -> float:
        return 0.0

    def terms(self, forward: Any, totals: StepTotals) -> Terms:
        return Terms(forward.hidden.detach(), sums={"threads": torch.tensor(torch.get_num_threads())})


def train_with_all_and_with_a_share(model: Path, logs: Path, out: Path) -> tuple[list[float], dict[str, Any]]:
    """Threads of each call, to a model alone and then to two at the same time; the weights of one in the end."""
    spec = ModelSpec(model, ThreadsObjective(), training=SFTConfig(lr=1e-2))
    rows, totals = text(num_rows=4), StepTotals(tokens=100.0)  # few enough for one micro-batch
    shared = replace(spec, training_at_once=2, scoring_at_once=2)
    specs = {"alone": spec, "policy": shared, "critic": shared}
    with open_models(RuntimeConfig(threads=2, device="cpu"), logs, specs) as models:
        trained = [ray.get(model.train.remote(rows, totals, 1e-2)) for model in models.values()]
        scored = [ray.get(model.score.remote(rows)) for model in models.values()]
        ray.get(models["policy"].save.remote(out))
    stepped = [answer["threads"] for answer in trained]
    passed = [float(np.max(scores.others["threads"])) for scores in scored]
    return [*stepped, *passed], load_file(out / "model.safetensors")


def test_models_that_work_at_the_same_time_share_their_threads(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    threads, weights = train_with_all_and_with_a_share(tiny_model, tmp_path / "logs", tmp_path / "one")
    assert threads == [2, 1, 1, 2, 1, 1]
    _, again = train_with_all_and_with_a_share(tiny_model, tmp_path / "logs", tmp_path / "two")
    torch.testing.assert_close(again, weights, rtol=0, atol=0)


def test_two_micro_batches_at_a_time_do_not_show(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    """With two threads scores and steps are those of one, within float32 rounding, and again to the same bits."""
    rows = text(num_rows=300)
    spec = ModelSpec(tiny_model, ThreadsObjective(), training=SFTConfig(lr=1e-2))

    def run(threads: int) -> tuple[Scores, list[dict[str, float]]]:
        runtime = RuntimeConfig(threads=threads, device="cpu")
        with open_models(runtime, tmp_path / "logs", {"policy": spec}) as models:
            steps = [ray.get(models["policy"].train.remote(rows, StepTotals(tokens=1500.0), 1e-2)) for _ in range(3)]
            return ray.get(models["policy"].score.remote(rows)), steps

    (one, one_steps), (two, two_steps), (again, again_steps) = run(1), run(2), run(2)
    # Each micro-batch had one of the two threads, so two were computed at a time.
    assert set(one.others["threads"]) == set(two.others["threads"]) == {1}
    np.testing.assert_allclose(two.nll, one.nll, rtol=1e-4)
    np.testing.assert_array_equal(two.nll, again.nll)
    assert two_steps == again_steps
    for found, expected in zip(two_steps, one_steps, strict=True):
        assert found["threads"] == 2 * expected["threads"]  # two micro-batches, one
        for name in ("nll", "grad_norm", "computed_tokens"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name


def threads_during_and_after(at_once: int) -> tuple[int, int]:
    """Threads of a Workhorse of five while `at_once` calls share them, and then."""
    workhorse = Workhorse(RuntimeConfig(threads=5, device="cpu"))
    with workhorse._share_threads(at_once):
        shared = torch.get_num_threads()
    return shared, torch.get_num_threads()


def test_a_share_of_threads_ends_with_its_call() -> None:
    # In a process of its own: vLLM, once loaded, fixes the number of threads of this one.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        found = list(process.map(threads_during_and_after, (1, 2, 3, 9)))
    assert found == [(5, 5), (2, 5), (1, 5), (1, 5)]


def test_the_port_of_a_process_group_is_kept_free_for_it(cluster: None) -> None:
    workhorse = Workhorse(RUNTIME)
    host, port = workhorse.rendezvous()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, port))
    store = torch.distributed.TCPStore(host, port, is_master=True)
    store.set("met", "yes")
    assert torch.distributed.TCPStore(host, port, is_master=False).get("met") == b"yes"
    workhorse.unload()


@pytest.mark.parametrize("takes_turns", [True, False])
def test_a_model_returns_what_it_keeps_where_a_generator_sleeps(
    takes_turns: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's allocator keeps the peak of a pass; after each turn only the model is left on the GPU."""
    returned: list[str] = []
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr("xray_runtime.engines.offload.release", lambda: returned.append("returned"))
    runtime = RuntimeConfig(device="cpu", threads=torch.get_num_threads(), generator_sleeps=takes_turns)
    learner, rank_info = Learner(runtime), RankInfo("reference", 0, 0, 1, "127.0.0.1", 1, None)
    learner.build(ModelSpec(tiny_model, ReferenceObjective(1.0)), rank_info)
    assert len(returned) == takes_turns
    learner.score(TextBatch(input_ids=Ragged.of([[5, 9, 7]]), prompt_lengths=np.array([1])))
    assert len(returned) == 2 * takes_turns


def test_steps_that_are_begun_ahead_follow_one_another(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    """Three steps that were begun before any was waited for give the answers and weights of three that were not."""
    batches = [text(num_rows=4, seed=number) for number in range(3)]
    spec = ModelSpec(tiny_model, SFTObjective(), training=SFTConfig(lr=1e-2))
    with open_models(RUNTIME, tmp_path / "logs", {"waits": spec, "ahead": spec}) as models:
        totals = [StepTotals(tokens=float(rows.num_response_tokens())) for rows in batches]
        calls = [models["ahead"].train.remote(*given, 1e-2) for given in zip(batches, totals, strict=True)]
        ahead = ray.get(calls)
        waited = [ray.get(models["waits"].train.remote(*given, 1e-2)) for given in zip(batches, totals, strict=True)]
        for role, model in models.items():
            ray.get(model.save.remote(tmp_path / role))
    assert ahead == waited
    assert len({answer["nll"] for answer in ahead}) == len(batches)
    weights = [load_file(tmp_path / role / "model.safetensors") for role in models]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps what is freed")
def test_a_frozen_model_releases_what_it_computed_with(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    spec = ModelSpec(tiny_model, ReferenceObjective(1.0), score_tokens=2**17)
    rows = text(num_rows=2500)
    with open_models(RUNTIME, tmp_path, {"before": spec}) as models:
        [process] = [psutil.Process(pid) for pid in pids(models["before"])]

        def held() -> int:
            return process.memory_info().rss - process.memory_info().shared

        opened = held()
        scores = ray.get(models["before"].score.remote(rows))
        kept = held() - opened
        ray.get(models["before"].release_memory.remote())
        assert held() - opened < kept / 4
        again = ray.get(models["before"].score.remote(rows))
    np.testing.assert_array_equal(again.ref_logprobs.values, scores.ref_logprobs.values)
