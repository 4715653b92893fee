"""Cycles in one process, each by another way of training: `python -m tests.e2e.cycles OUTPUT [WAY …]`."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from tests.unit.live.serving.recording import KEYS, exchange, with_recorder
from xray.deployments.local_services import local_services
from xray.deployments.quiet import quiet_environment
from xray_runtime.kernel.files import write_atomic
from xray_runtime.kernel.history.reference import resolve
from xray_runtime.kernel.processes import kill_tagged, start_reaper
from xray_runtime.live.flywheel import FlywheelConfig
from xray_runtime.live.serving.middleware import key_digest
from xray_runtime.live.serving.recorder import AnswerRecorder
from xray_runtime.methods.loading import resolved_yaml, validate

PROJECT = "cycles"
NAME = f"{PROJECT}-policy"
PEOPLE, ASKED = 12, 6
SOURCE = "wombat"
"""A word in each prompt of the dataset, and nowhere else."""
GATES = ("min_win_rate", "max_kl", "max_length_ratio", "max_judge_drop", "max_regression")
LIFECYCLE: dict[str, Any] = {
    "project": PROJECT,
    "generator": {"engine": "transformers"},
    "evaluate": {"num_prompts": 8, "max_new_tokens": 4, "bootstrap_samples": 100, "num_samples_shown": 8},
    # Nothing good comes of so little training.
    "promotion": dict.fromkeys(GATES),
}
SHAPE = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 128}
PPO = {"iterations": 2, "prompts_per_iteration": 8, "minibatch_size": 8, "epochs": 1, "max_new_tokens": 4}
WAYS: dict[str, dict[str, Any]] = {
    "kto": {"batch_size": 16},
    "dpo": {"batch_size": 16},
    "ppo": PPO | {"reward": {"epochs": 1, "batch_size": 16}},
}
"""Stage that makes the policy of a cycle → its config."""


def word(person: int, number: int, cycle: int) -> str:
    """A word that occurs in what a person writes and reads, and nowhere else."""
    return f"quokka{person}x{number}x{cycle}"


def build(output: Path) -> None:
    """A dataset, and a model that is not trained."""
    from prefect import flow

    import xray

    draw = random.Random(0)
    rows = [{"prompt": f"{SOURCE} {draw.randrange(10**6)} {n}", "completion": f"it is {n}"} for n in range(80)]
    source = output / "rows.jsonl"
    write_atomic(source, "".join(json.dumps(row) + "\n" for row in rows))

    @flow(name="base", task_runner=xray.task_runner(), persist_result=False)
    def base() -> None:
        with xray.workspace(output, project=PROJECT):
            data = xray.prepare(source=str(source), min_chars=1, heldout_fraction=0.25)
            xray.fresh_base(data, name="base", vocab_size=320, max_positions=160, **SHAPE)

    base()


def record(output: Path, cycle: int) -> None:
    """A day: each answer gets a thumb, and each second one a correction."""
    model = resolve("base", output, None)[1].sha256
    asked = [(person, number) for person in range(PEOPLE) for number in range(ASKED)]
    draw, exchanges, said = random.Random(cycle), [], []
    for n, (person, number) in enumerate(asked, start=1000 * cycle):
        text = f"{word(person, number, cycle)} and {draw.randrange(10**9)} with {draw.randrange(10**9)}"
        exchanges.append(exchange(n, f"person {person}", text, model=model))
        better = f"{word(person, number, cycle)} is right"
        feedback = {"thumb": "down", "correction": better} if n % 2 else {"thumb": "up"}
        said.append({"answer": f"{n:032x}", "user": f"person {person}"} | feedback)

    async def work(recorder: AnswerRecorder) -> None:
        await recorder.keep(exchanges, {}, True)
        bodies = [json.dumps(body).encode() for body in said]
        for status, content in await asyncio.gather(*(recorder.feedback(b, key_digest(KEYS["shop"])) for b in bodies)):
            assert status == 200, content

    with_recorder(output, work, answers_per_hour=10**4, feedback_per_hour=10**4)


def cycles(output: Path, ways: list[str]) -> None:
    """A cycle for each way, and the promotion of the last candidate."""
    from xray.flows.flywheel import flywheel
    from xray.flows.promote import ApprovalInput, promote_flow

    build(output)
    rules = {"heldout_fraction": 0.3, "max_share": 0.3}
    for number, way in enumerate(ways, start=1):
        record(output, number)
        shared = {"rules": rules, "start": "base", "data": "prepare", "min_rows": 8}
        flywheel(str(output), FlywheelConfig.model_validate(shared | {way: WAYS[way]}))
    approve = promote_flow(lambda text: ApprovalInput(approve=True, name="Ada", note="it is better"))
    approve(str(output), NAME, None, None, None, None, None)


def main() -> None:
    output, ways = Path(sys.argv[1]), sys.argv[2:] or list(WAYS)
    output.mkdir(parents=True)
    write_atomic(output / "config.yaml", resolved_yaml(validate(LIFECYCLE)))
    quiet_environment()
    tag = start_reaper()
    try:
        with local_services(output):
            cycles(output, ways)
    finally:
        kill_tagged(tag)


if __name__ == "__main__":
    main()
