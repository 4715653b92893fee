"""Distillation on real Ray, DeepSpeed and sampling: a teacher that is the student teaches exactly nothing, another one
is followed, and a resumed stage writes the same bytes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from tests.component.conftest import TINY
from tests.component.distilling import WEIGHTS, attempt
from tests.component.models import RUNTIME
from tests.component.processes import open_models
from tests.unit.methods.ppo.recorder import FakeRecorder
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.stage import Stage
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.data.pairs import HELDOUT, TRAIN, Example, write_pairs
from xray_runtime.data.tokenizing import encode_prompts
from xray_runtime.data.tokens import Tokens
from xray_runtime.kernel.files import link_or_copy
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.kernel.store.seal import process_seal
from xray_runtime.methods.distill_replies.body import run as distill_replies
from xray_runtime.methods.distill_replies.config import DistillRepliesConfig
from xray_runtime.methods.distill_replies.kind import DistillRepliesInputs
from xray_runtime.models.causal_lm import load_tokenizer
from xray_runtime.models.teacher_objective import TeacherObjective


@pytest.fixture(scope="module")
def other(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with the student's tokenizer and other weights."""
    folder = tmp_path_factory.mktemp("other")
    for file in tiny_model.iterdir():
        link_or_copy(file, folder / file.name)
    random = torch.Generator().manual_seed(5)
    weights = {n: w + 0.05 * torch.randn(w.shape, generator=random) for n, w in load_file(tiny_model / WEIGHTS).items()}
    (folder / WEIGHTS).unlink()
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    return folder


def test_a_teacher_that_is_the_student_teaches_exactly_nothing(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    """At the sampled token, at another temperature than 1: not a bit of the weights changes in six steps."""
    recorder = attempt(tiny_model, tiny_model, tmp_path / "same", iterations=3, temperature=0.7)
    for number, point in enumerate(recorder.points):
        assert (point["kl/teacher_k1"], point["kl/teacher_k3"], point["policy/grad_norm"]) == (0.0, 0.0, 0.0)
        table = read_shard(shard_path(tmp_path / "same" / "out" / "ledger", number)).table
        assert table["teacher_logprobs"].to_pylist() == table["logprobs"].to_pylist()
    before, after = load_file(tiny_model / WEIGHTS), load_file(tmp_path / "same" / "out" / WEIGHTS)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(("beta", "top_k"), [(0.0, None), (0.5, 16), (1.0, 4)])
def test_equal_distributions_are_0_apart(
    cluster: None, tiny_model: Path, tmp_path: Path, beta: float, top_k: int | None
) -> None:
    """The student's pass has a gradient and other micro-batches than the teacher's: what is left is their rounding."""
    given: dict[str, Any] = {"beta": beta, "top_k": top_k, "lr": 1e-12}
    [point] = attempt(tiny_model, tiny_model, tmp_path / "same", iterations=1, **given).points
    assert abs(point["policy/teacher_divergence"]) < 1e-8
    assert point["kl/teacher_k1"] == 0.0


def test_a_resumed_stage_writes_the_same_bytes(cluster: None, tiny_model: Path, other: Path, tmp_path: Path) -> None:
    whole = attempt(tiny_model, other, tmp_path / "whole", iterations=3, beta=0.5)
    resumed = attempt(tiny_model, other, tmp_path / "resumed", iterations=3, beta=0.5, newest=whole.snapshots[1])
    assert len(resumed.points) == 1
    for name in (WEIGHTS, "ledger/000002.parquet"):
        assert (tmp_path / "whole" / "out" / name).read_bytes() == (tmp_path / "resumed" / "out" / name).read_bytes()


SHOWN_POLICY: dict[str, Any] = {"source": "policy", "demonstration": "shown", "shown": "{demonstration} {prompt}"}


def test_a_policy_that_is_shown_a_demonstration_teaches_itself(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    """Its log-probabilities are its own after another prompt, and a resumed stage writes the same bytes."""
    whole = attempt(tiny_model, None, tmp_path / "whole", iterations=3, **SHOWN_POLICY)
    first = read_shard(shard_path(tmp_path / "whole" / "out" / "ledger", 0)).table.to_pylist()
    tokenizer = load_tokenizer(tiny_model)
    texts = ["hello there", "how are you", "fine thanks", "hello", "are you fine", "thanks"]
    read = [[{"role": "user", "content": f"hello you {texts[row['prompt']]}"}] for row in first]
    rows = TextBatch.of(encode_prompts(tokenizer, read), [row["reply_ids"] for row in first])
    with open_models(RUNTIME, tmp_path / "asked", {"policy": ModelSpec(tiny_model, TeacherObjective(1.0))}) as models:
        expected = ray.get(models["policy"].score.remote(rows)).teacher_logprobs
    for row, its in zip(first, expected, strict=True):
        assert row["teacher_logprobs"] == pytest.approx(its.tolist(), abs=1e-5)
        assert row["teacher_logprobs"] != pytest.approx(row["logprobs"], abs=1e-3)
    resumed = attempt(tiny_model, None, tmp_path / "resumed", iterations=3, newest=whole.snapshots[1], **SHOWN_POLICY)
    assert len(resumed.points) == 1
    for name in (WEIGHTS, "ledger/000002.parquet"):
        assert (tmp_path / "whole" / "out" / name).read_bytes() == (tmp_path / "resumed" / "out" / name).read_bytes()


def by_replies(
    student: Path, root: Path, columns: list[str] | None = None, teacher: Path | None = None, **fields: Any
) -> FakeRecorder:
    """`distill_replies` on six replies, each in every step."""
    root.mkdir()
    replies = ["hello you", "fine thanks", "how are you", "thanks", "today", "hello there"]
    examples = [
        Example(
            str(i), "c", [{"role": "user", "content": "how"}], text, columns="{}" if columns is None else columns[i]
        )
        for i, text in enumerate(replies)
    ]
    for side in (TRAIN, HELDOUT):
        write_pairs(root / side, Example, examples)
    (root / "dataset.json").write_text('{"max_prompt_tokens": 32}')
    given: dict[str, Any] = {"steps": 8, "batch_size": 6, "top_k": 5, "schedule": "constant", **fields}
    config = DistillRepliesConfig(**given)

    @contextlib.contextmanager
    def opened(specs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        with open_models(RUNTIME, root / "logs", specs) as models:
            yield models

    inputs = DistillRepliesInputs(Model(student), Dataset(root), None if teacher is None else Model(teacher))
    recorder = FakeRecorder(root, None)
    (root / "out").mkdir()
    given_stage = ("distill", 3, config, inputs, RUNTIME, opened, {})
    distill_replies(Stage(*given_stage), root / "out", recorder)  # type: ignore[arg-type]
    return recorder


def test_a_teacher_and_what_it_logged_teach_the_same_bytes(
    cluster: None, tiny_model: Path, other: Path, tmp_path: Path
) -> None:
    taught = by_replies(tiny_model, tmp_path / "taught", teacher=other)
    first, last = taught.points[0], taught.points[-1]
    assert last["distill/heldout_divergence"] < 0.5 * first["distill/heldout_divergence"]

    tokens = Tokens(tmp_path / "taught" / TRAIN, Example, load_tokenizer(tiny_model), process_seal())
    spec = ModelSpec(other, TeacherObjective(1.0, 5, TINY.vocab_size))
    with open_models(RUNTIME, tmp_path / "asked", {"teacher": spec}) as models:
        scores = ray.get(models["teacher"].score.remote(tokens.take(range(len(tokens)))))
    found = zip(scores.teacher_topk_ids, scores.teacher_topk_logprobs, strict=True)
    columns = [json.dumps({"ids": ids.tolist(), "said": said.tolist()}) for ids, said in found]
    by_replies(tiny_model, tmp_path / "logged", columns, logged={"ids": "ids", "logprobs": "said"})
    weights = [(tmp_path / name / "out" / WEIGHTS).read_bytes() for name in ("taught", "logged")]
    assert weights[0] == weights[1]
    with pytest.raises(ValueError, match=r"^distill\.logged: the column 'ids' of row '\d' is not allowed: must be 4"):
        by_replies(tiny_model, tmp_path / "other", columns, logged={"ids": "ids", "logprobs": "said"}, top_k=4)


def test_replies_are_learned_beside_the_divergence(cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    """By the student's own distributions nothing is learned; by the replies, with `nll_coef`, they are."""
    points = by_replies(tiny_model, tmp_path / "itself", teacher=tiny_model, lr=1e-12).points
    assert max(abs(point["distill/divergence"]) for point in points) < 1e-8
    points = by_replies(tiny_model, tmp_path / "replies", teacher=tiny_model, nll_coef=1.0).points
    assert points[-1]["distill/nll"] < points[0]["distill/nll"] - 0.1
