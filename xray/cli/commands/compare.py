"""`xray compare`: blind human comparison of two models; the verdicts become training data."""

from __future__ import annotations

import getpass
import json
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from xray.cli.auditing import audit_progress
from xray.cli.conversation import MaxNewTokens, Seed, Temperature, audit_summary, judges_text, sampling_of, shown, typed
from xray.cli.exit_codes import FAILED
from xray.cli.options import AsJson, Output, Ref, Tracking
from xray.tasks.output_directory import file_lock, saved_config
from xray_runtime.kernel.terminal import print_table

if TYPE_CHECKING:
    from xray_runtime.data.pairs import Messages
    from xray_runtime.kernel.history.graph import Node
    from xray_runtime.kernel.history.reference import LineageStore
    from xray_runtime.live.feedback.comparison import PairSampler, ReplyComparison
    from xray_runtime.live.feedback.judgements import Question
    from xray_runtime.live.feedback.session import Session

PANEL = "People"
KEYS = "1 left   2 right   t tie   b both bad   s skip   u back   q quit"


def command(
    first: Ref,
    second: Ref,
    output: Output = None,
    prompts: Annotated[
        str, typer.Option(help="heldout, train, typed, or a .jsonl file with a column `prompt`.")
    ] = "heldout",
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 50,
    judge: Annotated[
        str | None, typer.Option(help="Name of the judge; it is recorded, not checked. Default: this user.")
    ] = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    tracking_uri: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Judge replies of two models side by side, without knowing which is which.

    Each verdict is saved at once; run the same command again to continue. `xray preferences` publishes the verdicts.
    Exit codes: 0 done, 1 a model's audit found something, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import resolve
    from xray_runtime.live.feedback.comparison import checked_source, plan_comparison, require_two
    from xray_runtime.live.feedback.session import Session, session_directory

    console = Console(stderr=as_json, highlight=False)
    a, b = resolve(first, output, tracking_uri), resolve(second, output, tracking_uri)
    store, models = require_two(a, b), (a[1], b[1])
    config = saved_config(store.output)
    chosen_temperature, longest = sampling_of(config, temperature, max_new_tokens)
    source = checked_source(prompts)
    _require_sound(store, models, console)
    comparison = plan_comparison(
        store, models, config, source, temperature=chosen_temperature, max_new_tokens=longest, seed=seed
    )
    directory = session_directory(store.output, comparison.setup)
    with file_lock(directory):
        session = Session.read(directory)
        _ask(comparison, session, comparison.prompts[:count], judge or getpass.getuser(), console)
        session.log()
    result = comparison.result(session)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _print_result(result, store, console)


def _ask(comparison: ReplyComparison, session: Session, prompts: list[Messages], judge: str, console: Console) -> None:
    """Ask `judge` every question that they have not answered yet, until they quit."""
    from xray_runtime.live.feedback.comparison import PairSampler

    done = {judgement.number for judgement in session.judgements if judgement.judge == judge}
    with ThreadPoolExecutor(1) as pool:
        interview = _Interview(session, PairSampler(comparison, session, pool), judge, console)
        try:
            if comparison.setup.prompts == "typed":
                interview.ask_typed(comparison, done)
            else:
                interview.ask_listed(prompts, done)
        except (KeyboardInterrupt, EOFError):
            console.print("stopped; run the same command to continue")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class _Interview:
    """The questions of one judge in a session."""

    session: Session
    sampler: PairSampler
    judge: str
    console: Console

    def ask_listed(self, prompts: list[Messages], done: set[int]) -> None:
        from xray_runtime.live.feedback.comparison import BATCH

        num_listed = len(self.session.questions)
        starts = range(num_listed, len(prompts), BATCH)
        pending = [self.sampler.submit(prompts[start : start + BATCH]) for start in starts]
        answered: list[int] = []
        number = 0
        while number < len(prompts):
            if number >= num_listed:
                self._wait(pending[(number - num_listed) // BATCH])
            question = self.session.questions[number]
            if number in done or question.a == question.b:
                number += 1
            elif self._ask(question, f"{number + 1} of {len(prompts)}"):
                done.add(number)
                answered.append(number)
            elif answered:
                number = answered.pop()
                done.discard(number)

    def ask_typed(self, comparison: ReplyComparison, done: set[int]) -> None:
        for question in list(self.session.questions):
            if question.number not in done and question.a != question.b:
                self._ask_last(question)
        while True:
            line = input("\nprompt> ") if sys.stdin.isatty() else sys.stdin.readline()
            if not line.strip():
                return
            prompt = [{"role": "user", "content": typed(line)}]
            if any(limits.excess(prompt) > 0 for limits in comparison.limits):
                self.console.print("too long for these models: shorten it", style="red")
                continue
            self._wait(self.sampler.submit([prompt]))
            question = self.session.questions[-1]
            if question.a == question.b:
                self.console.print(Text(f"both replied: {shown(question.a)}"))
            else:
                self._ask_last(question)

    def _ask_last(self, question: Question) -> None:
        while not self._ask(question, str(question.number + 1)):
            self.console.print("this is the first question: there is no earlier one", style="red")

    def _wait(self, pending: Future[None]) -> None:
        with self.console.status("the models are answering"):
            pending.result()

    def _ask(self, question: Question, progress: str) -> bool:
        """Show one question and save the verdict; False if the person goes back instead."""
        from xray_runtime.data.pairs import prompt_text
        from xray_runtime.live.feedback.judgements import KEYS as VERDICTS, left_model

        console, left = self.console, left_model(self.session.setup.seed, self.judge, question.number)
        replies = (question.a, question.b) if left == "a" else (question.b, question.a)
        console.print()
        console.print(Panel(Text(shown(prompt_text(question.prompt))), title=progress, title_align="left"))
        sides = Table.grid(expand=True)
        for _ in replies:
            sides.add_column(ratio=1)
        sides.add_row(
            *(Panel(Text(shown(reply)), title=f"[bold]{n}[/bold]") for n, reply in enumerate(replies, start=1))
        )
        console.print(sides)
        console.print(KEYS, style="dim")
        while (key := _key()) not in VERDICTS:
            if key == "q":
                raise KeyboardInterrupt
            if key == "u":
                return False
            console.print(Text(f"{key!r} is not allowed: {KEYS}"), style="red")
        self.session.judge(question.number, self.judge, key)
        console.print(Text(f"  {VERDICTS[key]}"), style="green")
        return True


def _key() -> str:
    """The next key; from a pipe, the next line."""
    if sys.stdin.isatty():
        # getchar drops keys that were pressed before the question was shown.
        key: str = typer.getchar()
        return key.lower()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip().lower()


def _require_sound(store: LineageStore, models: tuple[Node, Node], console: Console) -> None:
    """Audit the models first: the verdicts become training data."""
    from xray_runtime.trust.audit.checkpoints import audit

    with audit_progress(console) as on_progress:
        result = audit(store, models, on_progress=on_progress)
    if not result.is_sound:
        Console(stderr=True, highlight=False, soft_wrap=True).print(audit_summary(result))
        raise typer.Exit(FAILED)


def _print_result(result: dict[str, Any], store: LineageStore, console: Console) -> None:
    verdicts, rate = result["verdicts"], result["win_rate"]
    console.print()
    if rate is None:
        console.print("there are no verdicts yet")
        return
    low, high = result["win_rate_ci95"]
    rows = {"a": (rate, low, high), "b": (1 - rate, 1 - high, 1 - low)}
    cells = [
        (shown(result["models"][side]), str(verdicts[side]), f"{share:.2f}", f"{least:.2f} to {most:.2f}")
        for side, (share, least, most) in rows.items()
    ]
    print_table(console, ("model", "preferred", "win rate", "95%"), cells)
    console.print(
        f"{result['prompts']} prompts judged: {verdicts['tie']} ties and {verdicts['bad']} both bad count half; "
        f"{verdicts['skip']} skipped, {result['same_reply']} not asked (equal replies)"
    )
    console.print(Text(f"judged by: {judges_text(result['judges'])}"))
    console.print(Text(f"publish them as a dataset: xray preferences --output {store.output}"), soft_wrap=True)
