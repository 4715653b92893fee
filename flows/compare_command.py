"""`xray compare` and `xray preferences`: people judge replies of two models blindly, and train on what they said."""

from __future__ import annotations

import getpass
import json
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flows.chat_command import MaxNewTokens, Seed, Temperature, audit_words, sampling_of, shown
from flows.lineage_commands import BROKEN, AsJson, Output, Ref, Tracking, checked
from flows.session import hold, saved_config
from xray_runtime.config_io import ConfigError

if TYPE_CHECKING:
    from xray_runtime.data.pairs import Messages
    from xray_runtime.feedback.judgements import Question
    from xray_runtime.feedback.session import Session
    from xray_runtime.feedback.speaker import Limits
    from xray_runtime.lineage.graph import Node
    from xray_runtime.lineage.reference import Place

BATCH = 32
"""Prompts answered at a time: what one batch of the sampler holds."""
KEYS = "1 left   2 right   t tie   b both bad   s skip   u back   q quit"


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(compare)
    app.command()(preferences)


def compare(
    first: Ref,
    second: Ref,
    output: Output = None,
    prompts: Annotated[
        str, typer.Option("--prompts", help="heldout, train, typed, or a .jsonl file with a column `prompt`.")
    ] = "heldout",
    count: Annotated[int, typer.Option("--count", min=1, help="How many prompts, of those there are.")] = 50,
    judge: Annotated[str | None, typer.Option("--judge", help="Who judges: a claim. Default: this user.")] = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    tracking_uri: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Judge replies of two models side by side, without knowing which is which.

    Each verdict is kept at once; the same command goes on where it was left. `xray preferences` publishes the verdicts.
    Exit codes: 0 done, 1 a model's audit found something, 2 bad input.
    """
    from xray_runtime.lineage.reference import resolve

    console = Console(stderr=as_json, highlight=False)
    place, a = checked(lambda: resolve(first, output, tracking_uri))
    other, b = checked(lambda: resolve(second, output, tracking_uri))
    asked = checked(lambda: _Comparison(place, a, other, b, prompts, temperature, max_new_tokens, seed))
    for node in (a, b):
        _require_sound(place, node, console)
    session = checked(lambda: asked.open(count))
    checked(lambda: asked.ask(session, count, judge or getpass.getuser(), console))
    result = asked.result(session)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _print_result(result, place, console)


def preferences(
    output: Annotated[Path, typer.Option("--output", help="Output directory of the lifecycle.")],
    tracking_uri: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Publish all that was judged in an output directory: a signed dataset to train reward models on.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.feedback.publication import publish
    from xray_runtime.lineage.reference import open_place

    place = checked(lambda: open_place(output, tracking_uri))
    project = checked(lambda: saved_config(output)).project
    done = checked(lambda: publish(place, project, getpass.getuser()))
    if as_json:
        print(json.dumps({"uri": done.checkpoint.uri, "sha256": done.checkpoint.sha256} | done.stats, indent=2))
        return
    counts = done.stats
    people = ", ".join(f"{name} {number}" for name, number in counts["judges"].items())
    print(f"{counts['pairs']} pairs from {counts['judgements']} judgements by {people}")
    if done.heldout:
        print(f"{done.heldout} of them have held-out prompts, which no lifecycle on the same data trains on")
    print(f"{'published' if done.is_new else 'there already'}: {done.checkpoint.uri}")
    print(f"train on it: xray run CONFIG --set preferences.source=dataset --set preferences.path={done.checkpoint.uri}")


class _Comparison:
    """Two models and what they are asked; everything a user can get wrong is noticed here.

    Raises:
        ConfigError: the models cannot be compared, or the prompts cannot be asked.
    """

    def __init__(
        self,
        place: Place,
        a: Node,
        other: Place,
        b: Node,
        prompts: str,
        temperature: float | None,
        max_new_tokens: int | None,
        seed: int,
    ) -> None:
        from xray_runtime.feedback.prompts import SPLITS, checked_source, dataset_of
        from xray_runtime.feedback.session import Setup
        from xray_runtime.feedback.speaker import Limits, require_speaker

        for node in (a, b):
            require_speaker(node)
            if node.sha256 not in place.graph.nodes or other.output.resolve() != place.output.resolve():
                raise ConfigError(
                    f"REF: {a.name} and {b.name} must lie in one output directory, where their judgements go too "
                    "(`xray export` and `xray import` bring one to the other)"
                )
        if a.sha256 == b.sha256:
            raise ConfigError(f"REF: both are {a.name}: must be two models")
        self._place, self._nodes, self._file = place, (a, b), Path(prompts)
        self._config = saved_config(place.output)
        temperature, max_new_tokens = sampling_of(self._config, temperature, max_new_tokens)
        self._limits = [Limits(node.directory, max_new_tokens, temperature) for node in (a, b)]
        kind, source = checked_source(prompts)
        self._setup = Setup.model_validate(
            {
                "a": a.sha256,
                "b": b.sha256,
                "prompts": kind,
                "source": dataset_of(place, [a, b]).sha256 if kind in SPLITS else source,
                "max_prompt_tokens": self._config.data.max_prompt_tokens if kind in SPLITS else None,
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "seed": seed,
            }
        )
        self._prompts = self._listed()

    def _listed(self) -> list[Messages]:
        from xray_runtime.feedback.prompts import of_dataset, of_file
        from xray_runtime.feedback.speaker import fitting

        setup = self._setup
        if setup.prompts == "typed":
            return []
        is_file = setup.prompts == "file"
        found = of_file(self._file) if is_file else of_dataset(self._place, list(self._nodes), setup)
        fit = fitting(found, self._limits, setup.max_prompt_tokens)
        if not fit:
            raise ConfigError(f"--prompts: none of the {len(found)} prompts can be asked: they are too long")
        return fit

    def open(self, count: int) -> Session:
        """The session, held by this process until it ends."""
        from xray_runtime.feedback.session import open_session

        session = open_session(self._place.output, self._setup)
        self._held = hold(session.directory)
        return session

    def ask(self, session: Session, count: int, judge: str, console: Console) -> None:
        """Ask `judge` what has no verdict of theirs yet, until they quit."""
        done = {judgement.number for judgement in session.judgements if judgement.judge == judge}
        with ThreadPoolExecutor(1) as pool:
            sampler = _Sampler(session, self._nodes, self._limits, self._config.runtime.device, pool)
            try:
                if self._setup.prompts == "typed":
                    _ask_typed(session, sampler, judge, done, console)
                else:
                    _ask_listed(session, sampler, self._prompts[:count], judge, done, console)
            except (KeyboardInterrupt, EOFError):
                console.print("stopped; the same command goes on from here")
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def result(self, session: Session) -> dict[str, Any]:
        """What everybody who judged these two said in this session."""
        from xray_runtime.feedback.judgements import tally

        same = sum(question.a == question.b for question in session.questions)
        names = {"a": self._nodes[0].name, "b": self._nodes[1].name}
        return {"session": session.name, "models": names, "same_reply": same} | tally(session.judgements)


class _Sampler:
    """Has both models answer ahead of the person, in a thread; they are loaded when the first answer is needed."""

    def __init__(
        self, session: Session, nodes: tuple[Node, Node], limits: list[Limits], device: str, pool: ThreadPoolExecutor
    ) -> None:
        self.limits = limits
        self._session, self._nodes = session, nodes
        self._device, self._pool = device, pool
        self._models: list[Any] = []

    def submit(self, prompts: list[Messages]) -> Future[None]:
        return self._pool.submit(self._answer, prompts)

    def _answer(self, prompts: list[Messages]) -> None:
        from xray_runtime.feedback.judgements import Question
        from xray_runtime.feedback.speaker import Answerer
        from xray_runtime.planning.workload import this_machine
        from xray_runtime.seeding import derive_seed

        if not self._models:
            device = this_machine(self._device).device
            pairs = zip(self._nodes, self.limits, strict=True)
            self._models = [Answerer(node.directory, limits, device) for node, limits in pairs]
        first = len(self._session.questions)
        seeds = [derive_seed(self._session.setup.seed, "compare", "sample", first + i) for i in range(len(prompts))]
        a, b = (model.answers(prompts, seeds) for model in self._models)
        self._session.add_questions(
            [Question(number=first + i, prompt=p, a=a[i], b=b[i]) for i, p in enumerate(prompts)]
        )


def _ask_listed(
    session: Session, sampler: _Sampler, prompts: list[Messages], judge: str, done: set[int], console: Console
) -> None:
    there = len(session.questions)
    coming = [sampler.submit(prompts[start : start + BATCH]) for start in range(there, len(prompts), BATCH)]
    asked: list[int] = []
    number = 0
    while number < len(prompts):
        if number >= there:
            _wait(coming[(number - there) // BATCH], console)
        question = session.questions[number]
        # Two equal replies say nothing about which is better.
        if number in done or question.a == question.b:
            number += 1
            continue
        if _judge(session, question, judge, f"{number + 1} of {len(prompts)}", console):
            done.add(number)
            asked.append(number)
        elif asked:
            number = asked.pop()
            done.discard(number)


def _ask_typed(session: Session, sampler: _Sampler, judge: str, done: set[int], console: Console) -> None:
    from xray_runtime.data.sources import clean

    for question in list(session.questions):
        _judge_typed(session, question, judge, done, console)
    while True:
        line = input("\nprompt> ") if sys.stdin.isatty() else sys.stdin.readline()
        if not clean(line):
            return
        prompt = [{"role": "user", "content": clean(line)}]
        if any(limits.excess(prompt) > 0 for limits in sampler.limits):
            console.print("too long for these models: say less", style="red")
            continue
        _wait(sampler.submit([prompt]), console)
        _judge_typed(session, session.questions[-1], judge, done, console)


def _judge_typed(session: Session, question: Question, judge: str, done: set[int], console: Console) -> None:
    if question.number in done:
        return
    if question.a == question.b:
        console.print(Text(f"both say: {shown(question.a)}"))
        return
    while not _judge(session, question, judge, str(question.number + 1), console):
        console.print("there is no question before this one to go back to", style="red")


def _wait(coming: Future[None], console: Console) -> None:
    if not coming.done():
        with console.status("the models are answering"):
            coming.result()
    coming.result()


def _judge(session: Session, question: Question, judge: str, progress: str, console: Console) -> bool:
    """Show one question and keep the verdict; False where the person wants to go back instead."""
    from xray_runtime.data.pairs import prompt_text
    from xray_runtime.feedback.judgements import KEYS as VERDICTS
    from xray_runtime.feedback.judgements import Judgement, left_model, verdict_of

    left = left_model(session.setup.seed, judge, question.number)
    replies = (question.a, question.b) if left == "a" else (question.b, question.a)
    console.print()
    console.print(Panel(Text(shown(prompt_text(question.prompt))), title=progress, title_align="left"))
    sides = Table.grid(expand=True)
    for _ in replies:
        sides.add_column(ratio=1)
    sides.add_row(*(Panel(Text(shown(reply)), title=f"[bold]{n}[/bold]") for n, reply in enumerate(replies, start=1)))
    console.print(sides)
    console.print(KEYS, style="dim")
    while True:
        key = _key()
        if key == "q":
            raise KeyboardInterrupt
        if key == "u":
            return False
        if key in VERDICTS:
            break
        console.print(Text(f"{key!r} is not allowed: {KEYS}"), style="red")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    verdict = verdict_of(key, left)
    session.add_judgement(Judgement(number=question.number, left=left, verdict=verdict, judge=judge, at=now))
    console.print(Text(f"  {VERDICTS[key]}"), style="green")
    return True


def _key() -> str:
    """The key a person pressed; through a pipe, the next line."""
    if sys.stdin.isatty():
        return click.getchar().lower()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip().lower()


def _require_sound(place: Place, node: Node, console: Console) -> None:
    """What is judged here is trained on later: a model that is not what it was must not get that far."""
    from xray_runtime.lineage.audit import audit

    with console.status(f"auditing {node.name}"):
        result = checked(lambda: audit(place, [node]))
    if not result.is_sound:
        Console(stderr=True, highlight=False, soft_wrap=True).print(audit_words(result))
        raise typer.Exit(BROKEN)


def _print_result(result: dict[str, Any], place: Place, console: Console) -> None:
    verdicts, rate = result["verdicts"], result["win_rate"]
    console.print()
    if rate is None:
        console.print("nothing was judged yet")
        return
    low, high = result["win_rate_ci95"]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("model", "preferred", "win rate", "95%"):
        table.add_column(column)
    rows = {"a": (rate, low, high), "b": (1 - rate, 1 - high, 1 - low)}
    for side, (share, least, most) in rows.items():
        interval = f"{least:.2f} to {most:.2f}"
        table.add_row(Text(shown(result["models"][side])), str(verdicts[side]), f"{share:.2f}", interval)
    console.print(table)
    console.print(
        f"{result['prompts']} prompts judged: {verdicts['tie']} ties and {verdicts['bad']} both bad count half; "
        f"{verdicts['skip']} skipped, {result['same_reply']} not asked (the same reply twice)"
    )
    people = ", ".join(f"{name} {number}" for name, number in result["judges"].items())
    console.print(Text(f"judged by: {people}"))
    console.print(Text(f"publish them as a dataset: xray preferences --output {place.output}"), soft_wrap=True)
