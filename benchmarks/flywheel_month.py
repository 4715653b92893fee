"""A simulated month of the nightly flow: does the served model get better, and what can one attacker do?

    python -m benchmarks.flywheel_month [--nights 30] [--arms calm bounded unbounded killed] [--way kto] [--output DIR]

The task is that of lesson 5 of `examples/`, from a model that is right half of the time. Forty people ask for the
largest of four digits; over thirty nights a third of them come to want the first digit instead. They thumb what they
get, and half of those who dislike it say what had been better. Eight are lazy: they thumb at random. `eve` asks as
much as all others together, answers gold questions well, and wants the smallest digit. The arms:

    calm        there is no attacker
    bounded     eve attacks; the rules and gates hold as they are by default
    unbounded   eve attacks; nobody's share is limited, and no gate looks at the judge
    killed      as bounded, and each night is killed once (`kill -9` of its process, after a random time) and run again

Each night is recorded by the recorder of `xray serve --record`, then `flows/flywheel.py` runs; what passes the gates
is promoted, and everything is audited. All arms start from copies of one directory and take turns, night by night, so
whatever ended can be compared. The same command goes on where it was stopped; commands with different `--arms` may
share an output directory, also at the same time once `base` is there.

`gold` is the share of served replies that the asking person wants, without eve and the lazy; its ceiling is what a
model reaches that always says the largest digit. `attacker` is the share of replies to the same people that are the
smallest digit and not wanted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.flywheel_public import (
    LAZY,
    MAX_NEW_TOKENS,
    MONTH,
    PEOPLE,
    Asked,
    answered,
    gold_questions,
    questions,
    record,
    write_gold,
)
from benchmarks.machine import machine, table
from xray.deployments.local_services import local_services, quiet_environment
from xray_runtime.algorithms.statistics import wilson_interval
from xray_runtime.config.allowed_imports import VARIABLE
from xray_runtime.config.flywheel import FlywheelConfig
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.loading import resolved_yaml, validate
from xray_runtime.data.recorded import KEYS, PSEUDONYMS, RECORDED, UserKeys
from xray_runtime.files import write_atomic
from xray_runtime.graph.artifacts import VERDICTS
from xray_runtime.lineage.audit.checkpoints import audit
from xray_runtime.lineage.graph import Node
from xray_runtime.lineage.promotion import champion_of
from xray_runtime.lineage.reference import open_lineage_store, resolve
from xray_runtime.processes import kill_tagged, start_reaper

PROJECT = "month"
NAME = f"{PROJECT}-policy"
ARMS = ("calm", "bounded", "unbounded", "killed")
PSEUDONYMS_KEY = b"month".ljust(32, b".")
"""Makes the pseudonyms, and so decides who is held out: the same people each time. Eve is not."""
EARLIEST_KILL_S = 3.0
WAY = "way"
"""Name of the file in an arm's directory that says how it learns: `kto` or `dpo`."""


def largest(prompts: list[str], replies: list[str]) -> list[float]:
    """The judge of the gates: 1 for the largest digit."""
    return [float(reply.strip() == max(prompt.split())) for prompt, reply in zip(prompts, replies, strict=True)]


@dataclass(frozen=True)
class Row:
    """A night of an arm."""

    arm: str
    night: int
    gold: float
    ceiling: float
    attacker: float
    asked: int
    """Number of replies that the three shares are of."""
    labels: int
    share: float
    """Eve's share of the labels."""
    judges_left_out: int
    state: str
    policy: str
    """sha256 of the policy that is served after the night."""
    audit: str
    killed_after_s: float | None
    seconds: float
    """Without answering and recording."""


def lifecycle(arm: str) -> LifecycleConfig:
    """The config that the output directory takes its evaluations and gates from."""
    evaluate = {"num_prompts": 128, "max_new_tokens": MAX_NEW_TOKENS, "bootstrap_samples": 200}
    # The next night's policy is judged beside the last one: it may not be worse.
    drop = None if arm == "unbounded" else 0.1
    gates = {"min_win_rate": None, "max_judge_drop": drop, "max_regression": None}
    return validate(
        {
            "project": PROJECT,
            "gold": "benchmarks.flywheel_month:largest",
            "generator": {"engine": "transformers"},
            "evaluate": evaluate,
            "promotion": gates,
        }
    )


def rules(arm: str, output: Path) -> FlywheelConfig:
    share = {"max_share": None} if arm == "unbounded" else {}
    curate = {"gold": str(output / "gold.jsonl"), **share}
    way = (output / WAY).read_text(encoding="utf-8")
    learn = {"epochs": 4, "lr": 3e-4, "beta": 0.2}
    return FlywheelConfig.model_validate({"rules": curate, "nights": 3, "start": "sft", way: learn})


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


def prepared(root: Path, arm: str, way: str) -> Path:
    """The arm's directory: a copy of the one with the first model."""
    base, output = root / "base", root / arm
    if not (base / "ready").exists():
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir(parents=True)
        write_atomic(base / "config.yaml", resolved_yaml(lifecycle(arm)))
        before_the_month(base)
        keys = base / RECORDED / KEYS
        keys.mkdir(parents=True, mode=0o700)
        (keys / PSEUDONYMS).write_bytes(PSEUDONYMS_KEY)
        (keys / PSEUDONYMS).chmod(0o600)
        (base / "ready").touch()
    if not output.exists():
        copy = root / f".{arm}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(base, copy, symlinks=True)
        # MLflow keeps where an experiment's artifacts go: those of runs to come belong to the copy.
        with closing(sqlite3.connect(copy / "mlflow.db")) as connection, connection:
            move = "update experiments set artifact_location = replace(artifact_location, ?, ?)"
            connection.execute(move, (str(base), str(output)))
        write_atomic(copy / "config.yaml", resolved_yaml(lifecycle(arm)))
        write_atomic(copy / WAY, way)
        write_gold(copy / "gold.jsonl", MONTH)
        copy.rename(output)
    return output


def served(output: Path) -> Node:
    """The policy that is served: the champion, or the first model."""
    champion = champion_of(open_lineage_store(output, None), NAME)
    return resolve(champion.checkpoint if champion is not None else "sft", output, None)[1]


def train_and_promote(output: Path, arm: str) -> None:
    """The nightly flow, released if it is held, and the promotion of what passes the gates. Safe to repeat."""
    from xray.flows import flywheel as flows, promote
    from xray.flows.nights import read_nights

    config = rules(arm, output)
    flows.flywheel(str(output), config)
    if read_nights(output)[-1].state == "held":
        flows.flywheel(str(output), config, release="the simulated operator: looked at it")
    night = read_nights(output)[-1]
    if night.state == "candidate" and served(output).sha256 != night.policy:
        approve = promote.promote_flow(
            lambda text: promote.Approval(approve=True, name="the simulated operator", note="the gates pass")
        )
        approve(str(output), NAME, None, None, None, None, None)


def killed_once(output: Path, arm: str, number: int) -> float | None:
    """As `train_and_promote`, in a process that is killed and started again; seconds until the kill."""
    command = [sys.executable, "-m", "benchmarks.flywheel_month", "--only", str(output), "--arms", arm]
    log = (output.parent / f"{arm}.log").open("ab")
    killed_after, after = None, random.Random(number).uniform(EARLIEST_KILL_S, 60.0)
    with log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            killed_after = after
    if killed_after is not None:
        with (output.parent / f"{arm}.log").open("ab") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True)
    return killed_after


def one_night(output: Path, arm: str, number: int) -> Row:
    """A day of questions, and the night after it."""
    model, attacked = served(output), arm != "calm"
    asked = answered(model.directory, questions(number, attacked), number)
    record(output, model.sha256, number, asked, gold_questions(number, attacked))
    began = time.monotonic()
    killed_after = None
    if arm == "killed":
        killed_after = killed_once(output, arm, number)
    else:
        train_and_promote(output, arm)
    # Only the last night's audit checks again what earlier ones found sound.
    found = audit(open_lineage_store(output, None), since_verified=number < MONTH)
    findings = [f for f in found.findings if f.is_broken]
    row = _row(output, arm, asked)
    state = f"{len(findings)} findings, such as {findings[0]}" if findings else "sound"
    return replace(row, night=number, audit=state, killed_after_s=killed_after, seconds=time.monotonic() - began)


def _row(output: Path, arm: str, asked: list[Asked]) -> Row:
    from xray.flows.nights import read_nights

    honest = [one for one in asked if one.user != "eve" and int(one.user.partition(" ")[2]) < PEOPLE - LAZY]
    right = sum(one.reply.strip() == one.wanted for one in honest)
    largest = sum(max(one.prompt.split()) == one.wanted for one in honest)
    attacker = sum(one.reply.strip() == min(one.prompt.split()) != one.wanted for one in honest)
    done = read_nights(output)[-1]
    rows = done.numbers
    return Row(
        arm=arm,
        night=done.number,
        gold=right / len(honest),
        ceiling=largest / len(honest),
        attacker=attacker / len(honest),
        asked=len(honest),
        labels=rows["labels_train"],
        share=_share(output, done.feedback),
        judges_left_out=rows["judges_left_out"],
        state=done.state + (", after release" if rows.get("released") else ""),
        policy=served(output).sha256,
        audit="",
        killed_after_s=None,
        seconds=0.0,
    )


def _share(output: Path, feedback: list[str]) -> float:
    """Eve's share of the labels that the last night curated."""
    eve = UserKeys(output / RECORDED / KEYS, writable=False).pseudonym("eve")
    curated = [n for n in open_lineage_store(output, None).graph.nodes.values() if n.manifest.kind == "curate"]
    # Its parents are the feedback of just these nights.
    [made] = [node for node in curated if set(node.manifest.parents.values()) == set(feedback)]
    lines = (made.directory / VERDICTS).read_text(encoding="utf-8").splitlines()
    judges = [json.loads(line)["judge"].split("+") for line in lines]
    return sum(each.count(eve) / len(each) for each in judges) / len(judges) if judges else 0.0


def picture(rows: list[Row], path: Path) -> None:
    """Gold and attacker by night, with 95% intervals (Wilson)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    fields = {"gold": "wanted replies", "attacker": "eve's replies"}
    for axes, (field, title) in zip(figure.subplots(1, 2), fields.items(), strict=True):
        for arm in dict.fromkeys(row.arm for row in rows):
            of_arm = [row for row in rows if row.arm == arm]
            nights, shares = [row.night for row in of_arm], [getattr(row, field) for row in of_arm]
            low, high = zip(*(wilson_interval(getattr(row, field), row.asked) for row in of_arm), strict=True)
            [line] = axes.plot(nights, shares, ":" if arm == "killed" else "-", marker=".", label=arm)
            if arm != "killed":
                axes.fill_between(nights, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        if field == "gold":
            ceiling = {row.night: row.ceiling for row in rows}
            axes.plot(sorted(ceiling), [ceiling[n] for n in sorted(ceiling)], "--", color="gray", label="ceiling")
        axes.set(title=f"share of {title}, by what is served", xlabel="night", ylim=(0, 1))
        axes.legend()
    figure.savefig(path, dpi=120)


def show(rows: list[Row]) -> None:
    """The table, and whether the nights that were killed gave the same policies."""
    columns = ("arm", "night", "gold (95%)", "ceiling", "attacker", "labels", "eve's share", "judges left out")
    cells = []
    for row in sorted(rows, key=lambda row: (ARMS.index(row.arm), row.night)):
        low, high = wilson_interval(row.gold, row.asked)
        gold = f"{row.gold:.3f} ({low:.3f} to {high:.3f})"
        killed = "" if row.killed_after_s is None else f"{row.killed_after_s:.0f}"
        cells.append(
            (
                *(row.arm, row.night, gold, f"{row.ceiling:.3f}", f"{row.attacker:.3f}", row.labels),
                *(f"{row.share:.3f}", row.judges_left_out, row.state, row.audit, killed, f"{row.seconds:.0f}"),
            )
        )
    table((*columns, "night ended as", "audit", "killed after s", "seconds"), cells)
    policies = {(row.arm, row.night): row.policy for row in rows}
    both = [n for arm, n in policies if arm == "killed" and ("bounded", n) in policies]
    same = sum(policies["killed", n] == policies["bounded", n] for n in both)
    print(f"\n{same} of {len(both)} nights of `killed` served the policy of `bounded`, to the byte")


def ended(root: Path) -> list[Row]:
    """All nights that ended, those of other commands too."""
    return [Row(**json.loads(line)) for arm in ARMS for line in _lines(root, arm)]


def _lines(root: Path, arm: str) -> list[str]:
    path = root / f"{arm}.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def run(root: Path, arms: list[str], nights: int, way: str) -> None:
    """The nights of these arms in turn that did not end before."""
    done = {(row.arm, row.night) for row in ended(root)}
    missing = [(number, arm) for number in range(1, nights + 1) for arm in arms if (arm, number) not in done]
    if not missing:
        return
    # Ray reads its settings when it is imported: after `quiet_environment`.
    with local_services(root):
        for number, arm in missing:
            row = one_night(prepared(root, arm, way), arm, number)
            lines = [*_lines(root, arm), json.dumps(asdict(row))]
            write_atomic(root / f"{arm}.jsonl", "\n".join(lines) + "\n")
            print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=MONTH)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--way", choices=("kto", "dpo"), default="kto", help="how the policy learns")
    parser.add_argument("--output", type=Path, default=Path("runs/flywheel-month"))
    parser.add_argument("--only", type=Path, help="run the last night of this arm's directory, and nothing else")
    options = parser.parse_args()
    os.environ[VARIABLE] = "benchmarks.flywheel_month"
    quiet_environment()
    if options.only is not None:
        with local_services(options.only):
            train_and_promote(options.only, options.arms[0])
        return
    root: Path = options.output.absolute() / options.way
    root.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}; {PEOPLE} people, {LAZY} of them lazy, {options.nights} nights\n", flush=True)
    tag = start_reaper()
    try:
        run(root, options.arms, options.nights, options.way)
    finally:
        kill_tagged(tag)
    rows = ended(root)
    show(rows)
    picture(rows, root / "month.png")
    print(f"\npicture: {root / 'month.png'}")


if __name__ == "__main__":
    main()
