"""The simulated public of `flywheel_month`: what it asks, what it is answered, and what it says of that."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from xray_runtime.config.serving import RecordingConfig
from xray_runtime.feedback.chat_model import BatchSampler, PromptLimits
from xray_runtime.lineage.signing import signing_key
from xray_runtime.seeding import derive_seed
from xray_runtime.serving.exchange import Exchange
from xray_runtime.serving.middleware import key_digest
from xray_runtime.serving.recorder import Recorder, RecorderSettings

PEOPLE, LAZY, ASKED, EVES = 40, 8, 8, 320
MOVED, MONTH = 1 / 3, 30
"""Share of the people whose taste is another after so many nights."""
GOLD_QUESTIONS = 6
MAX_NEW_TOKENS, BATCH = 4, 256
DAY_MS, BEGIN_MS = 86_400_000, 1_700_000_000_000
APPLICATION, KEY = "public", "the key of the simulated public"


class Asked(NamedTuple):
    """A question of a person, and what they want to hear."""

    user: str
    prompt: str
    wanted: str
    reply: str = ""


def wanted(person: int, prompt: str, night: int) -> str:
    """The digit that a person wants to hear in a night."""
    digits = prompt.split()
    has_moved = person < PEOPLE * MOVED * (night - 1) / (MONTH - 1)
    return digits[0] if has_moved else max(digits)


def questions(night: int, attacked: bool) -> list[Asked]:
    """Everything that is asked in a night."""
    draw, found = random.Random(night), list[Asked]()
    for person in range(PEOPLE):
        for _ in range(ASKED):
            prompt = " ".join(f"{draw.randrange(10_000):04}")
            found.append(Asked(f"person {person}", prompt, wanted(person, prompt, night)))
    for _ in range(EVES if attacked else 0):
        prompt = " ".join(f"{draw.randrange(10_000):04}")
        found.append(Asked("eve", prompt, min(prompt.split())))
    return found


def gold_questions(night: int, attacked: bool) -> list[Asked]:
    """Questions whose right answers are known, the same every night, put to everybody."""
    people = [f"person {person}" for person in range(PEOPLE)] + (["eve"] if attacked else [])
    found = []
    for user in people:
        for number in range(GOLD_QUESTIONS):
            prompt = f"9 {number} {(number + night) % 9} 0"
            found.append(Asked(user, prompt, "9", "9" if number % 2 else str(number)))
    return found


def write_gold(path: Path, nights: int) -> None:
    asked = {(one.prompt, one.reply) for night in range(1, nights + 1) for one in gold_questions(night, False)}
    rows = [{"prompt": prompt, "reply": reply, "good": reply == "9"} for prompt, reply in sorted(asked)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def answered(model: Path, asked: list[Asked], night: int) -> list[Asked]:
    """The questions with the model's replies."""
    import torch

    # So small a model is slower on two threads, which wait for each other.
    torch.set_num_threads(1)
    sampler = BatchSampler(model, PromptLimits(model, MAX_NEW_TOKENS, 1.0), "cpu")
    replies: list[str] = []
    for start in range(0, len(asked), BATCH):
        part = asked[start : start + BATCH]
        seeds = [derive_seed(0, "month", night, start + i) for i in range(len(part))]
        replies += sampler.answers([[{"role": "user", "content": one.prompt}] for one in part], seeds)
    return [one._replace(reply=reply) for one, reply in zip(asked, replies, strict=True)]


def feedback_of(one: Asked, draw: random.Random, is_gold: bool) -> dict[str, Any]:
    """A person's feedback on a reply."""
    person = one.user.partition(" ")[2]
    if person and int(person) >= PEOPLE - LAZY:
        return {"thumb": draw.choice(["up", "down"])}
    if one.reply.strip() == one.wanted:
        return {"thumb": "up"}
    better = not is_gold and (one.user == "eve" or draw.random() < 0.5)
    return {"thumb": "down"} | ({"better": one.wanted} if better else {})


def record(output: Path, model: str, night: int, asked: list[Asked], gold: list[Asked]) -> None:
    """Keep a day's answers and feedback, as `xray serve --record` does."""
    settings = RecorderSettings(
        output=output,
        private=signing_key(output),
        config=RecordingConfig(answers_per_hour=10**6, feedback_per_hour=10**6),
        applications={key_digest(KEY): APPLICATION},
        redaction={},
        path=(),
        logs=None,
    )
    draw = random.Random(night)

    async def work() -> None:
        recorder = Recorder(settings)
        await recorder.check()
        exchanges = [_exchange(one, model, night, number) for number, one in enumerate([*asked, *gold])]
        await recorder.keep(exchanges, {}, True)
        said = [feedback_of(one, draw, number >= len(asked)) for number, one in enumerate([*asked, *gold])]
        bodies = [{"answer": exchange.id} | each for exchange, each in zip(exchanges, said, strict=True)]
        for start in range(0, len(bodies), 500):
            part = [json.dumps(body).encode() for body in bodies[start : start + 500]]
            for status, content in await asyncio.gather(*(recorder.feedback(b, key_digest(KEY)) for b in part)):
                assert status == 200, content
        await recorder.close()

    asyncio.run(work())


def _exchange(one: Asked, model: str, night: int, number: int) -> Exchange:
    choice = {"index": 0, "message": {"role": "assistant", "content": one.reply}, "finish_reason": "stop"}
    return Exchange(
        id=f"{night:08x}{number:024x}",
        at_ms=BEGIN_MS + night * DAY_MS + number,
        route="/v1/chat/completions",
        model=model,
        user=one.user,
        application="",
        request=json.dumps({"messages": [{"role": "user", "content": one.prompt}]}).encode(),
        answer=json.dumps({"choices": [choice]}).encode(),
        streamed=False,
        complete=True,
        latency_s=0.0,
        first_s=0.0,
        prompt_tokens=0,
        reply_tokens=0,
    )
