"""A simulated month of the nightly flow: does the served model get better, and what can one attacker do?

    python -m benchmarks.flywheel_month [--nights 30] [--arms calm capped uncapped] [--output DIR]

The task is that of lesson 5 of `examples/`, from a model that is right half of the time. Forty people ask for the
largest of four digits; over thirty nights a third of them come to want the first digit instead. They thumb what they
get, and half of those who dislike it say what had been better. Eight are lazy: they thumb at random. `eve` asks
more than all others together, answers gold questions well, and wants the smallest digit: in the arm `capped`
the rules hold as they are by default, in `uncapped` nobody's share is limited, and in `calm` there is no attacker. Each
night is recorded by the recorder of `xray serve --record`, then `flows/flywheel.py` runs; what passes the gates is
promoted.

`gold` is the share of served replies that the asking person wants, without eve and the lazy; `attacker` is the share of
replies to them that are the smallest digit and not wanted.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import machine, table
from xray.deployments.local_services import local_services, quiet_environment
from xray_runtime.config.allowed_imports import VARIABLE
from xray_runtime.config.flywheel import FlywheelConfig
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import resolved_yaml, validate
from xray_runtime.config.recording import RecordingConfig
from xray_runtime.data.recorded import KEYS, RECORDED, UserKeys
from xray_runtime.feedback.chat_model import BatchSampler, PromptLimits
from xray_runtime.files import write_atomic
from xray_runtime.lineage.reference import open_lineage_store, resolve
from xray_runtime.lineage.signing import signing_key
from xray_runtime.processes import kill_tagged, start_reaper
from xray_runtime.seeding import derive_seed
from xray_runtime.serving.exchange import Exchange
from xray_runtime.serving.middleware import key_digest
from xray_runtime.serving.recorder import Recorder, RecorderSettings

PEOPLE, LAZY, ASKED, EVES = 40, 8, 8, 480
MOVED, MONTH = 1 / 3, 30
"""Share of the people whose taste is another after so many nights."""
GOLD_QUESTIONS = 6
MAX_NEW_TOKENS, BATCH = 4, 256
DAY_MS, BEGIN_MS = 86_400_000, 1_700_000_000_000
APPLICATION, KEY = "public", "the key of the simulated public"
PROJECT = "month"
NAME = f"{PROJECT}-policy"
ARMS = ("calm", "capped", "uncapped")


def largest(prompts: list[str], replies: list[str]) -> list[float]:
    """The judge of the gates: 1 for the largest digit."""
    return [float(reply.strip() == max(prompt.split())) for prompt, reply in zip(prompts, replies, strict=True)]


class Asked(NamedTuple):
    """A question of a person, and what they want to hear."""

    user: str
    prompt: str
    wanted: str
    reply: str = ""


@dataclass(frozen=True)
class Row:
    """A night of an arm."""

    night: int
    gold: float
    attacker: float
    pairs: int
    share: float
    """The attacker's share of the pairs to train on."""
    judges_left_out: int
    state: str


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


def lifecycle() -> LifecycleConfig:
    """The config that the output directory takes its evaluations and gates from."""
    evaluate = {"num_prompts": 256, "max_new_tokens": MAX_NEW_TOKENS, "bootstrap_samples": 200}
    # The next night's policy is judged beside the last one: it may not be worse.
    gates = {"min_win_rate": None, "max_judge_drop": 0.05, "max_regression": None}
    gold = f"{__name__ if __name__ != '__main__' else 'benchmarks.flywheel_month'}:largest"
    return validate({"project": PROJECT, "gold": gold, "evaluate": evaluate, "promotion": gates})


def rules(arm: str, gold: Path) -> FlywheelConfig:
    share = {"max_share": None} if arm == "uncapped" else {}
    curate = {"gold": str(gold), **share}
    return FlywheelConfig.model_validate(
        {"rules": curate, "nights": 3, "start": "sft", "dpo": {"epochs": 3, "lr": 3e-4}}
    )


def before_the_month(output: Path) -> None:
    """The dataset, and the model that is right half of the time."""
    # Prefect reads its settings when it is imported: the server must be up.
    from prefect import flow

    from xray.tasks.task_runner import task_runner
    from xray.tasks.workspace import Workspace

    lesson = importlib.import_module("examples.lessons.05_grpo_with_a_verifier")
    lesson.write_problems(output / "problems.jsonl")

    @flow(name="before the month", task_runner=task_runner(), persist_result=False)
    def build() -> None:
        with Workspace(output, project=PROJECT):
            lesson.half_right(output / "problems.jsonl")

    build()


def month(output: Path, arm: str, nights: int) -> Iterator[Row]:
    """Every night of an arm."""
    from xray.flows import flywheel as flows, promote

    output.mkdir(parents=True, exist_ok=True)
    write_atomic(output / "config.yaml", resolved_yaml(lifecycle()))
    gold_file = output / "gold.jsonl"
    write_gold(gold_file, nights)
    before_the_month(output)
    config, attacked = rules(arm, gold_file), arm != "calm"
    for night in range(1, nights + 1):
        champion = promote.promotion.champion_of(open_lineage_store(output, None), NAME)
        model = resolve(champion.checkpoint if champion is not None else "sft", output, None)[1]
        asked = answered(model.directory, questions(night, attacked), night)
        record(output, model.sha256, night, asked, gold_questions(night, attacked))
        done = flows.flywheel(str(output), config)
        if done["state"] == "held":
            done = flows.flywheel(str(output), config, release="the simulated operator: looked at it")
            done["state"] += ", after release"
        if done["state"].startswith("candidate"):
            approve = promote.promote_flow(
                lambda text: promote.Approval(approve=True, name="the simulated operator", note="the gates pass")
            )
            approve(str(output), NAME, None, None, None, None, None)
        yield _row(output, night, asked, done)


def _row(output: Path, night: int, asked: list[Asked], done: dict[str, Any]) -> Row:
    honest = [one for one in asked if one.user != "eve" and int(one.user.partition(" ")[2]) < PEOPLE - LAZY]
    right = sum(one.reply.strip() == one.wanted for one in honest)
    attacker = sum(one.reply.strip() == min(one.prompt.split()) != one.wanted for one in honest)
    store = open_lineage_store(output, None)
    eve = UserKeys(output / RECORDED / KEYS, writable=False).pseudonym("eve")
    curated = max(
        (node for node in store.graph.nodes.values() if node.manifest.kind == "curate"),
        key=lambda node: node.directory.stat().st_mtime_ns,
    )
    counts = json.loads((curated.directory / "people.json").read_text())
    rows = done["numbers"]
    total = sum(rows[f"{kind}_{side}"] for kind in ("pairs", "labels") for side in ("train", "heldout"))
    return Row(
        night,
        right / len(honest),
        attacker / len(honest),
        rows["pairs_train"],
        counts.get(eve, 0) / total if total else 0.0,
        rows["judges_left_out"],
        done["state"],
    )


def picture(found: dict[str, list[Row]], path: Path) -> None:
    """Gold and attacker by night."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, field, title in zip(
        figure.subplots(1, 2), ("gold", "attacker"), ("wanted replies", "eve's replies"), strict=True
    ):
        for arm, rows in found.items():
            axes.plot([row.night for row in rows], [getattr(row, field) for row in rows], marker="o", label=arm)
        axes.set(title=f"share of {title}, by what is served", xlabel="night", ylim=(0, 1))
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=4)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--output", type=Path, default=Path("runs/flywheel-month"))
    options = parser.parse_args()
    root: Path = options.output.absolute()
    root.mkdir(parents=True, exist_ok=True)
    os.environ[VARIABLE] = "benchmarks.flywheel_month"
    print(f"{machine()}; {PEOPLE} people, {LAZY} of them lazy, {options.nights} nights\n")
    tag = start_reaper()
    found: dict[str, list[Row]] = {}
    try:
        quiet_environment()
        with local_services(root):
            for arm in options.arms:
                found[arm] = []
                for row in month(root / arm, arm, options.nights):
                    found[arm].append(row)
                    print(arm, row, flush=True)
    finally:
        kill_tagged(tag)
    table(
        ("arm", "night", "gold", "attacker", "pairs", "attacker's share of rows", "judges left out", "night ended as"),
        [
            (
                arm,
                row.night,
                f"{row.gold:.3f}",
                f"{row.attacker:.3f}",
                row.pairs,
                f"{row.share:.3f}",
                row.judges_left_out,
                row.state,
            )
            for arm, rows in found.items()
            for row in rows
        ],
    )
    picture(found, root / "month.png")
    print(f"\npicture: {root / 'month.png'}")


if __name__ == "__main__":
    main()
