"""Human verdicts: one on two replies to one prompt, the side of each model, and the sum of many verdicts.

Two models are compared, `a` and `b`. A person sees their replies as left and right and does not know which is which:
the seed draws the sides anew for each prompt and judge.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from xray_runtime.algorithms.verdicts import SHARES, mean_share
from xray_runtime.data.pairs import Messages, PreferenceExample
from xray_runtime.kernel.seeding import derive_seed

Model = Literal["a", "b"]
Verdict = Literal["a", "b", "tie", "bad", "skip"]
"""`bad`: neither is acceptable; `skip`: no opinion."""

KEYS = {"1": "left", "2": "right", "t": "tie", "b": "both bad", "s": "skip"}
"""Key that a person presses → its meaning."""


class _JudgementRow(BaseModel):
    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")


class Question(_JudgementRow):
    """A prompt and the replies of the two models."""

    number: Annotated[int, Field(ge=0)]
    """Position in the order in which prompts are asked."""
    prompt: Messages
    a: str
    b: str


class Judgement(_JudgementRow):
    """One person's verdict on one question."""

    number: Annotated[int, Field(ge=0)]
    left: Model
    """The model on the left."""
    verdict: Verdict
    judge: str
    at: str
    """When (ISO 8601)."""
    correction: Annotated[str, Field(min_length=1, max_length=2**16)] | None = None
    """A reply that is better than both."""


def left_model(seed: int, judge: str, number: int) -> Model:
    """The model whose reply `judge` sees on the left of question `number`: a fair coin, the same for the same seed."""
    return "b" if derive_seed(seed, "compare", "left", judge, number) % 2 else "a"


def verdict_of(key: str, left: Model) -> Verdict:
    """The verdict of `key` (of KEYS) where `left` is on the left."""
    right: Model = "b" if left == "a" else "a"
    verdicts: dict[str, Verdict] = {"1": left, "2": right, "t": "tie", "b": "bad", "s": "skip"}
    return verdicts[key]


def latest_verdicts(judgements: Iterable[Judgement]) -> dict[tuple[int, str], Judgement]:
    """(question, judge) → the verdict that counts, which is the last one: people may change their mind."""
    return {(j.number, j.judge): j for j in judgements}


def pairs(questions: Iterable[Question], judgements: Iterable[Judgement], session: str) -> list[PreferenceExample]:
    """A preference pair for each verdict that prefers one reply, by question, then judge; a correction is preferred to
    both."""
    by_number = {question.number: question for question in questions}
    preferences = []
    for (number, judge), judgement in sorted(latest_verdicts(judgements).items()):
        q, name = by_number[number], f"{session}-{number}-{judge}"
        if judgement.verdict in ("a", "b"):
            chosen, rejected = (q.a, q.b) if judgement.verdict == "a" else (q.b, q.a)
            preferences.append(PreferenceExample(name, q.prompt, chosen, rejected))
        if judgement.correction is not None:
            replies = {"a": q.a, "b": q.b}.items()
            better = [(side, reply) for side, reply in replies if reply != judgement.correction]
            preferences += [
                PreferenceExample(f"{name}-{s}", q.prompt, judgement.correction, reply) for s, reply in better
            ]
    return preferences


def tally(judgements: Iterable[Judgement]) -> dict[str, Any]:
    """The sum of the verdicts.

    `prompts` is the number judged (without skips); `verdicts` counts each kind, and `judges` each person's, with skips.
    `win_rate` is of `a` over `b`, where ties and two bad replies count half. Several judges of one prompt are averaged,
    so that the 95% interval (`win_rate_ci95`) is over prompts. Both are None without verdicts.
    """
    verdicts = dict.fromkeys(get_args(Verdict), 0)
    judges, shares = Counter[str](), defaultdict[int, list[float]](list)
    for (number, judge), judgement in sorted(latest_verdicts(judgements).items()):
        verdicts[judgement.verdict] += 1
        judges[judge] += 1
        if judgement.verdict in SHARES:
            shares[number].append(SHARES[judgement.verdict])
    rate, interval = mean_share(shares.values()) if shares else (None, None)
    return {
        "prompts": len(shares),
        "verdicts": verdicts,
        "judges": dict(judges),
        "win_rate": rate,
        "win_rate_ci95": list(interval) if interval is not None else None,
    }
