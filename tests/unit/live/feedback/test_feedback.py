"""What people judge: blind sides, verdicts counted, and a session that loses nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.agents.environments import samples
from tests.unit.data.encoding import encode_replies
from tests.unit.trust.synthetic import comparison
from xray_runtime.agents.environments.pool import EnvironmentPool
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.pairs import Messages, prompt_text
from xray_runtime.data.tokenizing import encode_prompts
from xray_runtime.engines.generators.transformers.sampler import TransformersSampler, stream
from xray_runtime.engines.sampling import EngineRank
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.history import signed_files
from xray_runtime.kernel.history.comparisons import JUDGEMENTS
from xray_runtime.kernel.history.evidence import evidence
from xray_runtime.live.feedback.chat_episode import play
from xray_runtime.live.feedback.chat_model import ChatModel, PromptLimits, fitting, last_messages
from xray_runtime.live.feedback.judgements import Judgement, Question, Verdict, left_model, pairs, tally, verdict_of
from xray_runtime.live.feedback.session import Session, read_sessions, session_directory
from xray_runtime.methods.common.environment_protocol import Step
from xray_runtime.models.causal_lm import fresh_llama, load_model, save_model
from xray_runtime.models.config import FreshBase

SMALL = FreshBase(hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=16, max_positions=64)
SETUP = comparison("a" * 64, "b" * 64)


def prompt(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def question(number: int) -> Question:
    return Question(number=number, prompt=prompt(f"q{number}"), a=f"a{number}", b=f"b{number}")


def said(number: int, verdict: Verdict, judge: str = "ada") -> Judgement:
    return Judgement(number=number, left="a", verdict=verdict, judge=judge, at="2026-01-01T00:00:00+00:00")


def test_sides_are_a_fair_coin_that_the_seed_decides() -> None:
    n = 4000
    sides = [left_model(0, "ada", i) for i in range(n)]
    # Four standard errors of a share over n draws.
    assert sides.count("a") / n == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / n))
    assert sides == [left_model(0, "ada", i) for i in range(n)]
    for other in ([left_model(1, "ada", i) for i in range(n)], [left_model(0, "bob", i) for i in range(n)]):
        agreeing = sum(x == y for x, y in zip(sides, other, strict=True)) / n
        assert agreeing == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / n))


def test_a_key_means_the_model_that_stands_there() -> None:
    assert [verdict_of(key, "a") for key in "12tbs"] == ["a", "b", "tie", "bad", "skip"]
    assert [verdict_of(key, "b") for key in "12tbs"] == ["b", "a", "tie", "bad", "skip"]


def test_the_win_rate_is_over_prompts() -> None:
    rows = [said(0, "a"), said(0, "b", "bob"), said(1, "b"), said(1, "a"), said(2, "tie"), said(3, "skip")]
    found = tally(rows)
    # Prompt 0: ½ (one of two judges); 1: 1 (ada changed her mind); 2: ½. Prompt 3 was skipped.
    assert found["win_rate"] == pytest.approx((0.5 + 1 + 0.5) / 3)
    assert found["prompts"] == 3
    assert found["verdicts"] == {"a": 2, "b": 1, "tie": 1, "bad": 0, "skip": 1}
    assert found["judges"] == {"ada": 4, "bob": 1}
    nothing = tally([said(0, "skip")])
    assert (nothing["prompts"], nothing["win_rate"], nothing["win_rate_ci95"]) == (0, None, None)


def test_pairs_are_what_was_preferred() -> None:
    rows = [said(1, "b"), said(0, "a"), said(1, "b", "bob"), said(2, "tie"), said(3, "bad"), said(4, "skip")]
    found = pairs([question(i) for i in range(5)], rows, "s")
    assert [(p.id, prompt_text(p.prompt), p.chosen, p.rejected) for p in found] == [
        ("s-0-ada", "q0", "a0", "b0"),
        ("s-1-ada", "q1", "b1", "a1"),
        ("s-1-bob", "q1", "b1", "a1"),
    ]


def test_a_session_goes_on_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session.read(session_directory(tmp_path, SETUP))
    session.add_questions([question(0), question(1)])
    session.add_judgement(said(0, "a"))

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    # Before the signature: the verdict was never given. After it: it counts.
    both = [said(0, "a"), said(1, "a")]
    for module, name, counted in ((evidence(), "append_line", both[:1]), (signed_files, "sync", both)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, crash)
            with pytest.raises(KeyboardInterrupt):
                session.add_judgement(said(1, "a"))
        [seen] = read_sessions(tmp_path)
        assert (seen.questions, seen.judgements) == ([question(0), question(1)], counted)
    going_on = Session.read(session.directory)
    with monkeypatch.context() as patch:
        # The change is beside its file.
        patch.setattr(signed_files.os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            going_on.add_judgement(said(1, "b"))
    again = Session.read(session_directory(tmp_path, SETUP))
    assert again.directory == session.directory
    again.add_questions([question(2)])
    [whole] = read_sessions(tmp_path)
    assert whole.judgements[:2] == [said(0, "a"), said(1, "a")]
    assert [q.number for q in whole.questions] == [0, 1, 2]
    assert session_directory(tmp_path, SETUP.model_copy(update={"seed": 1})) != session.directory


def test_an_unsigned_line_is_refused(tmp_path: Path) -> None:
    session = Session.read(session_directory(tmp_path, SETUP))
    session.add_judgement(said(0, "a"))
    path = session.directory / JUDGEMENTS
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ConfigError, match=r"judgements\.jsonl: somebody else changed it"):
        Session.read(session.directory)
    # A verdict that another process signed meanwhile is not overwritten.
    with pytest.raises(ConfigError, match=r"judgements\.jsonl: somebody else changed it"):
        session.add_judgement(said(1, "a"))


@pytest.fixture
def saved(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    save_model(fresh_llama(SMALL, tiny_tokenizer, seed=5), tiny_tokenizer, tmp_path / "model")
    return tmp_path / "model"


def test_a_streamed_reply_is_the_one_a_batch_would_hold(saved: Path) -> None:
    limits = PromptLimits(saved, 24, 1.0)
    ids = limits.tokenizer("hello there")["input_ids"]
    [batched] = TransformersSampler(saved, EngineRank("cpu")).sample([ids], [11], limits.sampling)
    assert list(stream(load_model(saved).eval(), ids, 11, limits.sampling)) == batched.token_ids
    speaker = ChatModel(saved, limits, "cpu")
    asked = encode_prompts(limits.tokenizer, [prompt("hello")])
    [reply] = TransformersSampler(saved, EngineRank("cpu")).sample(asked, [3], limits.sampling)
    # Of random weights come random bytes: most characters take several tokens, many are none.
    tokens: list[int] = []
    pieces = list(speaker.reply(asked[0], 3, tokens))
    assert tokens == reply.token_ids
    assert "".join(pieces) == limits.tokenizer.decode(reply.token_ids, skip_special_tokens=True)
    assert len(pieces) > 2


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Scripted:
    """Says what it is told to: of random weights come no calls."""

    def __init__(self, limits: PromptLimits, *replies: str) -> None:
        self._limits, self._replies = limits, iter(replies)
        self.read: list[list[int]] = []

    def reply(self, ids: list[int], seed: int, tokens: list[int]) -> Iterator[str]:
        self.read.append(ids)
        text = next(self._replies)
        tokens += encode_replies(self._limits.tokenizer, [text.removesuffix("…")])[0]
        if text.endswith("…"):
            tokens.pop()  # cut off: without the end of its turn
        yield text


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(f"{samples.__name__}:calculator", 1, 60.0, 2048) as pool:
        yield pool


@pytest.fixture
def limits(tmp_path: Path, tiny_tokenizer: Any) -> PromptLimits:
    lm = fresh_llama(SMALL.model_copy(update={"max_positions": 1024}), tiny_tokenizer, seed=5)
    save_model(lm, tiny_tokenizer, tmp_path / "roomy")
    return PromptLimits(tmp_path / "roomy", 24, 1.0)


def played(
    limits: PromptLimits, pool: EnvironmentPool, *replies: str, max_turns: int = 8
) -> tuple[list[Any], Scripted]:
    model = Scripted(limits, *replies)
    return list(play(model, limits, prompt("three"), 0, pool, max_turns)), model  # type: ignore[arg-type]


def test_tools_are_called_in_a_chat(limits: PromptLimits, pool: EnvironmentPool) -> None:
    events, model = played(limits, pool, CALL, "three")
    answer = {"role": "tool", "name": "add", "content": "3"}
    assert events == [CALL, Step([answer], info={"tool_errors": 0}), "three", Step(reward=1.0, terminated=True)]
    # Token in, token out: the second prompt is all of the first, what was said, and what was answered.
    [said] = encode_replies(limits.tokenizer, [CALL])
    assert model.read[1] == [*model.read[0], *said, *chat_format(limits.tokenizer).observations([answer], said[-1])]
    assert "Add two numbers." in limits.tokenizer.decode(model.read[0])


def test_an_episode_ends_where_nothing_can_follow(limits: PromptLimits, pool: EnvironmentPool) -> None:
    assert played(limits, pool, "3…")[0] == ["3…"]
    events, _ = played(limits, pool, CALL, CALL, "three", max_turns=2)
    assert [event for event in events if isinstance(event, str)] == [CALL, CALL]
    # Each call and its answer take about a hundred tokens of the model's 1024.
    events, model = played(limits, pool, *[CALL] * 20, max_turns=20)
    assert isinstance(events[-1], Step)
    assert 2 < len(model.read) < 20
    assert all(limits.excess_of(len(ids)) <= 0 for ids in model.read)
    with pytest.raises(ValueError, match=r"^too long for the model by \d+ tokens: shorten it$"):
        list(play(model, limits, prompt("three " * 900), 0, pool, 2))  # type: ignore[arg-type]


def test_long_prompts_are_shortened_or_left_out(saved: Path) -> None:
    limits = PromptLimits(saved, 24, 1.0)
    long = "how are you today " * 16
    sizes = [
        len(limits.tokenizer.apply_chat_template(prompt(t), add_generation_prompt=True)["input_ids"])
        for t in ("hello", long)
    ]
    assert sizes[0] <= 40 < sizes[1]  # 64 positions, 24 of them for the reply
    assert limits.excess(prompt(long)) == sizes[1] - 40
    assert fitting([prompt(long), prompt("hello")], [limits, limits], None) == [prompt("hello")]
    assert fitting([prompt("hello")], [limits], sizes[0] - 1) == []
    talk = [*prompt(long), {"role": "assistant", "content": "yes"}, *prompt("hello")]
    assert limits.cut(talk) == prompt("hello")
    with pytest.raises(ConfigError, match="--max-new-tokens: 64 is not allowed: must be less than the model's 64"):
        PromptLimits(saved, 64, 1.0)


def test_a_prompt_begins_with_the_user() -> None:
    talk = [
        {"role": role, "content": str(i)} for i, role in enumerate(["user", "assistant", "user", "assistant", "user"])
    ]
    assert last_messages(talk, 1) == talk[-1:]
    assert last_messages(talk, 2) == talk[-1:]
    assert last_messages(talk, 3) == talk[-3:]
    assert last_messages(talk, None) == talk


def test_sampling_is_seeded(saved: Path) -> None:
    limits, lm = PromptLimits(saved, 24, 1.0), load_model(saved).eval()
    ids = limits.tokenizer("how are you")["input_ids"]
    replies = [tuple(stream(lm, ids, seed, limits.sampling)) for seed in (1, 1, 2)]
    assert replies[0] == replies[1] != replies[2]
    assert torch.is_grad_enabled()
