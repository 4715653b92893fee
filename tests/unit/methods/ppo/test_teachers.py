"""Teachers in PPO's loop over models in this process: who scores what, what the update gets, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import xray
from tests.message_texts import Messages
from tests.unit.methods.ppo.loop import (
    KL_PER_TOKEN,
    MAX_NEW_TOKENS,
    MINIBATCH,
    REPLIES,
    PPOModel,
    World,
    attempt,
    logprob,
)
from xray_runtime.algorithms.losses import PolicyLossInputs
from xray_runtime.data.batch import PromptBatch, ReplyBatch, Rollout, Scores, TextBatch
from xray_runtime.data.ledger import read_shard, shard_path
from xray_runtime.data.pairs import Example, write_pairs
from xray_runtime.data.pictures import PLACEHOLDER
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.tokenizing import CHATML, train_tokenizer
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.graph.artifacts import Dataset, Model
from xray_runtime.kernel.graph.graph import recording
from xray_runtime.methods.common import teacher_prompts
from xray_runtime.methods.distill.config import DistillConfig
from xray_runtime.methods.distill.kind import DISTILL
from xray_runtime.methods.ppo.experience import build_experience
from xray_runtime.methods.ppo.kind import PPOInputs
from xray_runtime.methods.ppo.metrics import summary
from xray_runtime.methods.ppo.objectives import KLToReference, PPOObjective
from xray_runtime.models.causal_lm import load_tokenizer

OFF_BY = {"teacher.0": 0.5, "teacher.1": -0.25}
"""How much the teachers' log-probabilities of a reply's first token lie above the policy's; the second's are equal."""
PROMPTS = [f"question number {number}" for number in range(10)]
OTHER_WORDS = ["zebras zigzag"]
SIZES: dict[str, Any] = {
    "prompts_per_iteration": REPLIES,
    "minibatch_size": MINIBATCH,
    "max_new_tokens": MAX_NEW_TOKENS,
}
FIELDS: dict[str, Any] = {
    "iterations": 1,
    "generator": {"engine": "transformers"},
    "rewards": [],
    "kl": {"controller": "fixed", "coef": 0.0},
    "advantages": "reinforce++",
    "whiten_advantages": False,
}


class Taught(PPOModel):
    """The loop's models, and teachers."""

    seen: list[tuple[str, list[list[int]]]]

    def _score(self, rows: TextBatch) -> Scores:
        if not self.role.startswith("teacher") and rows.prompt_lengths.max() < 16:
            return super()._score(rows)
        self._note("score")
        texts.append((self.role, [ids.tolist() for ids in rows.input_ids]))
        found = self._logprobs(rows)
        surplus = np.float32(OFF_BY.get(self.role, 1.0)) * ((np.arange(len(found.values)) + 1) % 2)
        taught = Ragged((found.values + surplus).astype(np.float32), found.offsets)
        return Scores(teacher_logprobs=taught) if self.role.startswith("teacher") else Scores(logprobs=taught)


texts: list[tuple[str, list[list[int]]]] = []


@pytest.fixture(autouse=True)
def _none_seen() -> None:
    texts.clear()


def make(root: Path, teachers: int = 1, *, template: str | None = None, corpus: Sequence[str] = PROMPTS) -> PPOInputs:
    """Ten prompts, each of a subject and with an example; a policy and teachers with tokenizers."""
    names = ["model", *(f"teacher-{number}" for number in range(teachers))]
    for name in ["data", *names]:
        (root / name).mkdir()
    for name in names:
        made = train_tokenizer([*(PROMPTS if name == "model" else corpus), "an answer"] * 5, 300)
        if name != "model" and template is not None:
            made.chat_template = template
        made.save_pretrained(root / name)
        (root / name / "config.json").write_text(json.dumps({"vocab_size": 300}))
    rows = [
        Example(
            str(i),
            "c",
            [{"role": "user", "content": text}],
            "an answer",
            columns=json.dumps({"subject": "math" if i % 3 else "code", "shown": f"{'an answer ' * 8}{i}"}),
        )
        for i, text in enumerate(PROMPTS)
    ]
    write_pairs(root / "data" / "train.arrow", Example, rows)
    (root / "data" / "dataset.json").write_text('{"max_prompt_tokens": 64}')
    models = [Model(root / name) for name in names]
    return PPOInputs(models[0], Dataset(root / "data"), teacher=models[1:])


def taught(inputs: PPOInputs, out: Path, distillation: dict[str, Any], **fields: Any) -> tuple[World, Any]:
    world = World()
    given: dict[str, Any] = FIELDS | {"distillation": distillation} | fields
    return world, attempt(inputs, out, world, model=Taught, **given)


def test_the_advantage_of_a_token_is_the_teachers_surplus(tmp_path: Path) -> None:
    world, recorder = taught(make(tmp_path), tmp_path / "out", {"coef": 2.0})
    for _, rows, *_ in world.batches:
        # .5 and 0 less their mean.
        assert rows.advantages.values.tolist() == pytest.approx([2 * 0.25, 2 * -0.25] * MINIBATCH, abs=1e-6)
        assert "teacher_logprobs" not in rows
    [point] = recorder.points
    assert point["kl/teacher_k1"] == pytest.approx(-0.5, abs=1e-6)
    assert point["kl/reference_k1"] == pytest.approx(2 * KL_PER_TOKEN, abs=1e-5)
    assert point["reward/mean"] == 0.0
    table = read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table
    given = np.concatenate([np.array(table[name].to_pylist()) for name in ("teacher_logprobs", "logprobs")], 1)
    assert (given[:, :2] - given[:, 2:]).tolist() == pytest.approx(np.array([[0.5, 0.0]] * REPLIES), abs=1e-6)
    assert table["reward"].to_pylist() == [0.0] * REPLIES


def surplus(tokens: PolicyLossInputs) -> Any:
    return -tokens.logprobs * (tokens.teacher_logprobs - tokens.rollout_logprobs)


def test_no_reference_is_read_where_its_coefficient_is_0(tmp_path: Path) -> None:
    """`kl.place` says where a term would be that there is none of."""
    made = DistillConfig(rewards=[], distillation={}, kl={"coef": 0.0, "place": "loss"}, **SIZES)  # type: ignore[arg-type]
    assert "reference" not in DISTILL.models(made)
    assert not any(
        isinstance(part, KLToReference) for part in PPOObjective(made).components(SimpleNamespace(scalar=None))
    )  # type: ignore[arg-type]
    text, ids = TextBatch.of([[1], [2]], [[3, 4], [5]]).with_columns(id=np.arange(2)), Ragged.of([[3, 4], [5]])
    logprobs = ids.like(np.full(3, -1.0, np.float32))
    rollout = Rollout(response_ids=ids, rollout_logprobs=logprobs, ended=np.ones(2, bool), version=np.zeros(2, int))
    scores = Scores(logprobs=logprobs, teacher_logprobs=logprobs)
    assert "ref_logprobs" not in build_experience(made, text, rollout, scores, torch.zeros(2), 0.0).rows


def test_a_loss_of_your_own_reads_the_teacher(tmp_path: Path, message_texts: Messages) -> None:
    given: dict[str, Any] = {"loss": "mine:surplus", "functions": {"mine:surplus": surplus}}
    given |= {"importance_correction": "none"}
    world, _ = taught(make(tmp_path), tmp_path / "out", {"coef": 0.0}, **given)
    for _, rows, *_ in world.batches:
        assert not rows.advantages.values.any()
        apart = rows.teacher_logprobs.values - rows.rollout_logprobs.values
        assert apart.tolist() == pytest.approx([0.5, 0.0] * MINIBATCH, abs=1e-6)
    inputs = replace(make(_folder(tmp_path / "none"), 0), teacher=[])
    with message_texts.raises(ValueError):
        attempt(inputs, tmp_path / "refused", World(), model=Taught, **FIELDS | given)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_column_says_which_teacher_a_row_has(tmp_path: Path, message_texts: Messages) -> None:
    inputs = make(tmp_path, 2)
    column: dict[str, Any] = {"column": "subject", "values": ["math", "code"]}
    _, _ = taught(inputs, tmp_path / "out", column)
    table = read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table
    columns = [table[name].to_pylist() for name in ("prompt", "teacher_logprobs", "logprobs")]
    for prompt, of_teacher, own in zip(*columns, strict=True):
        off = OFF_BY["teacher.0" if prompt % 3 else "teacher.1"]
        assert np.subtract(of_teacher, own).tolist() == pytest.approx([off, 0.0], abs=1e-6)
    assert {len(rows) for _, rows in texts} < {1, 2, 3, REPLIES}
    # Each rank of a teacher needs a row, and one of them has two at most.
    texts.clear()
    taught(inputs, tmp_path / "ranks", column, frozen={"num_workhorses": 3})
    assert {len(rows) for _, rows in texts} <= {3, REPLIES}
    again = read_shard(shard_path(tmp_path / "ranks" / "ledger", 0)).table
    assert again["teacher_logprobs"].equals(table["teacher_logprobs"])
    with message_texts.raises(ValueError):
        taught(inputs, tmp_path / "other", column | {"values": ["math", "law"]})
    # All rows are read before anything is opened.
    world = World()
    with message_texts.raises(ValueError):
        attempt(inputs, tmp_path / "missing", world, model=Taught, **FIELDS, distillation=column | {"column": "topic"})
    assert world.calls == []


def test_the_policy_teaches_itself_with_a_demonstration(tmp_path: Path) -> None:
    """It reads the same reply after a prompt with the demonstration, and samples without one."""
    inputs = replace(make(tmp_path), teacher=[])
    shown = {"source": "policy", "demonstration": "shown", "shown": "{prompt}. For example: {demonstration}"}
    world, _ = taught(inputs, tmp_path / "out", shown)
    [(role, rows)] = texts
    assert role == "policy"
    table = read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table
    read = train_tokenizer([*PROMPTS, "an answer"] * 5, 300)
    for ids, prompt, reply in zip(rows, *(table[name].to_pylist() for name in ("prompt", "reply_ids")), strict=True):
        said = read.decode(ids[: -len(reply)])
        assert said == f"<|user|>question number {prompt}. For example: {'an answer ' * 8}{prompt}<|end|><|assistant|>"
        assert ids[-len(reply) :] == reply
    for _, batch, *_ in world.batches:
        assert batch.advantages.values.tolist() == pytest.approx([0.5, -0.5] * MINIBATCH, abs=1e-6)


def test_a_prompt_may_have_the_name_of_the_demonstration_in_braces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.PROMPTS", [f"fill in {{demonstration}} {number}" for number in range(10)])
    shown = {"source": "policy", "demonstration": "shown", "shown": "{prompt} as {demonstration}"}
    taught(replace(make(tmp_path), teacher=[]), tmp_path / "out", shown)
    [(_, rows)] = texts
    read = train_tokenizer([*PROMPTS, "an answer"] * 5, 300)
    assert all(read.decode(ids).count("an answer ") == 8 for ids in rows)


def test_a_teacher_must_read_what_the_policy_reads(tmp_path: Path, message_texts: Messages) -> None:
    """One token more in its template; another vocabulary, of which distributions cannot be compared. Nothing was opened
    before."""
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("template", {"template": CHATML}, {}),
        ("words", {"corpus": OTHER_WORDS}, {"beta": 0.5}),
    ]
    for name, given, distillation in cases:
        inputs, world = make(_folder(tmp_path / name), **given), World()
        with message_texts.raises(ValueError):
            attempt(inputs, tmp_path / name / "out", world, model=Taught, **FIELDS | {"distillation": distillation})
        assert world.calls == []


def test_a_teacher_of_another_vocabulary_reads_the_texts(tmp_path: Path) -> None:
    """The words of the loop are single characters, tokens of both; prompts are other tokens."""
    inputs = make(tmp_path, corpus=OTHER_WORDS)
    taught(inputs, tmp_path / "out", {"coef": 2.0})
    [(role, rows)] = texts
    assert role == "teacher.0"
    table = read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table
    own, its = load_tokenizer(inputs.policy.path), load_tokenizer(inputs.teacher[0].path)
    prompts, replies = table["prompt"].to_pylist(), table["reply_ids"].to_pylist()
    for read, prompt, reply in zip(rows, prompts, replies, strict=True):
        messages = [{"role": "user", "content": PROMPTS[prompt]}]
        text = its.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert its.decode(read[:-1]) == text + own.decode(reply[:-1])
        assert read[-1] == its.eos_token_id
    given = np.concatenate([np.array(table[name].to_pylist()) for name in ("teacher_logprobs", "logprobs")], 1)
    assert (given[:, 0] - given[:, 2]).tolist() == pytest.approx([0.5] * REPLIES, abs=1e-6)


def test_replies_that_it_reads_as_other_text_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message_texts: Messages
) -> None:
    """Their last word is half of a character. They count in no mean of the others, get no advantage, and are counted;
    where that is so in many and all, nothing would be taught."""
    inputs = make(tmp_path, corpus=OTHER_WORDS)
    broken = load_tokenizer(inputs.policy.path).get_vocab()["Ã"]  # byte-level BPE's name of the first byte of an ü

    def sampled(self: PPOModel, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        found = PPOModel._generate(self, rows, sampling, version)
        ids = [[broken, reply[1]] if row in half else reply for row, reply in enumerate(found.response_ids)]
        tokens = Ragged.of(ids)
        return found.with_columns(response_ids=tokens, rollout_logprobs=tokens.like(logprob(tokens.values)))

    monkeypatch.setattr(Taught, "_generate", sampled)
    half = {0, 2}
    _, recorder = taught(inputs, tmp_path / "out", {"coef": 2.0})
    table = read_shard(shard_path(tmp_path / "out" / "ledger", 0)).table
    assert [ids[0] == broken for ids in table["reply_ids"].to_pylist()] == [True, False, True, False]
    for row in (0, 2):
        assert table["teacher_logprobs"].to_pylist()[row] == table["logprobs"].to_pylist()[row]
    # Both others have a surplus of .5 at one of two tokens, the mean of which is .25.
    expected = [[0, 0], [-0.5, 0.5], [0, 0], [0.5, -0.5]]
    assert table["advantages"].to_pylist() == pytest.approx(np.array(expected), abs=1e-6)
    [point] = recorder.points
    assert (point["rollout/teacher_unread"], point["kl/teacher_k1"]) == (2.0, pytest.approx(-0.5, abs=1e-6))
    assert "2 replies unread by the teacher" in summary(point)
    half = {0, 1, 2, 3}
    _, recorder = taught(inputs, tmp_path / "few", {"coef": 2.0})
    assert (recorder.points[0]["rollout/teacher_unread"], recorder.points[0]["kl/teacher_k1"]) == (4.0, 0.0)
    monkeypatch.setattr(teacher_prompts, "MOST_UNREAD", 8)
    with message_texts.raises(ValueError):
        taught(inputs, tmp_path / "none", {"coef": 2.0}, iterations=2)


def test_any_stop_of_the_policy_ends_a_reply_for_the_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that only the generation config calls an end, as Qwen's does <|endoftext|>; it is the teacher's end."""
    inputs = make(tmp_path, corpus=OTHER_WORDS)
    [stop] = load_tokenizer(inputs.policy.path).encode("an", add_special_tokens=False)
    (inputs.policy.path / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))

    def sampled(self: PPOModel, rows: PromptBatch, sampling: Any, version: int) -> ReplyBatch:
        found = PPOModel._generate(self, rows, sampling, version)
        assert stop in sampling.stop_token_ids
        tokens = Ragged.of([reply[0], stop] for reply in found.response_ids)
        return found.with_columns(response_ids=tokens, rollout_logprobs=tokens.like(logprob(tokens.values)))

    monkeypatch.setattr(Taught, "_generate", sampled)
    _, recorder = taught(inputs, tmp_path / "out", {})
    assert recorder.points[0]["rollout/teacher_unread"] == 0.0
    [(_, rows)] = texts
    assert {read[-1] for read in rows} == {load_tokenizer(inputs.teacher[0].path).eos_token_id}


def test_a_prompt_that_it_cannot_read_is_refused_before_anything_is_computed(
    tmp_path: Path, message_texts: Messages
) -> None:
    inputs = make(tmp_path, corpus=OTHER_WORDS)
    picture = {"sha256": "ab" * 32, "width": 8, "height": 8}
    prompt = [{"role": "user", "content": PLACEHOLDER, "pictures": [picture]}]
    own = load_tokenizer(inputs.policy.path)
    teacher = teacher_prompts.TeacherPrompts("ppo.teacher.0", inputs.teacher[0].path, own, reads_texts=True)
    with message_texts.raises(ValueError):
        teacher.check([(prompt, [1])])


def test_a_template_of_other_words_and_the_same_tokens_is_allowed(tmp_path: Path) -> None:
    own = train_tokenizer([*PROMPTS, "an answer"] * 5, 300).chat_template
    taught(make(tmp_path, template=own + "{# the same #}"), tmp_path / "out", {})


def test_the_whole_of_a_large_vocabulary_is_refused(tmp_path: Path, message_texts: Messages) -> None:
    inputs = make(tmp_path)
    (inputs.policy.path / "config.json").write_text('{"text_config": {"vocab_size": 151936}}')
    with message_texts.raises(ValueError):
        taught(inputs, tmp_path / "out", {"beta": 0.5, "top_k": None})


def test_distill_is_ppo_without_critic_group_or_reference() -> None:
    config = DistillConfig(**SIZES)
    assert (config.critic_in_use, config.samples_per_prompt, config.temperature) == ("none", 1, 1.0)
    assert set(DISTILL.models(config)) == {"generator", "policy", "teacher.0"}
    assert set(DISTILL.models(DistillConfig(kl={"coef": 0.1}, **SIZES))) == {  # type: ignore[arg-type]
        *("generator", "policy", "reference", "teacher.0"),
    }


MODEL = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}


@pytest.mark.parametrize(
    ("teachers", "fields"),
    [
        (0, {}),
        (2, {}),
        (1, {"distillation": {"source": "policy"}}),
        (0, {"distillation": {"source": "policy", "demonstration": "d", "beta": 1.0}}),
        (1, {"distillation": {"column": "subject"}}),
        (1, {"distillation": {"values": ["math", "code"]}}),
        (1, {"distillation": {"demonstration": "d", "shown": "{prompt}"}}),
        (1, {"distillation": {"coef": 0.0}}),
        (1, {"distillation": {"beta": 1.5}}),
        (1, {"distillation": {"demonstration": "example"}}),
        (2, {"distillation": {"column": "subject", "values": ["math", "code"]}}),
        (1, {"curriculum": {"by": "column", "column": "level"}}),
        (1, {"validation": {"every": 1}}),
        (1, {"reference": True}),
        (1, {"resample_rounds": 1, "samples_per_prompt": 2}),
    ],
    ids=lambda value: json.dumps(value),
)
def test_what_does_not_fit_is_refused_as_the_graph_is_written(
    teachers: int, fields: dict[str, Any], message_texts: Messages
) -> None:
    with recording():
        chats = xray.prepare(source="chitchat", validation_fraction=0.1)
        models = [xray.fresh_base(chats, **MODEL, name=f"teacher-{number}") for number in range(teachers)]
        student = xray.fresh_base(chats, **MODEL, name="student")
        given = fields | ({"reference": student} if "reference" in fields else {})
        with message_texts.raises(ConfigError):
            xray.distill(student, teacher=models, prompts=chats, **given)


def lengths(prompts: list[str], replies: list[str]) -> list[float]:
    return [float(len(reply)) for reply in replies]


def test_ppo_says_how_its_teacher_counts(message_texts: Messages) -> None:
    with recording():
        chats = xray.prepare(source="chitchat")
        model = xray.fresh_base(chats, **MODEL)
        given: dict[str, Any] = {"prompts": chats, "teacher": model, "rewards": [xray.reward(lengths)]}
        with message_texts.raises(ConfigError):
            xray.ppo(model, **given)
        xray.ppo(model, **given, distillation={"coef": 0.1})
