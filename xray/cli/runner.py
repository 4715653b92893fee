"""One attempt at a run or a search, as the supervisor's child.

`python -m xray.cli.runner JOB` runs the `Job` in that file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from xray.cli.exit_codes import BAD_INPUT, FAILED, INTERRUPTED
from xray.cli.job import SIGNALS, Job
from xray.deployments.local_services import Health, services
from xray.deployments.patience import LOST, NotUpError
from xray.deployments.quiet import quiet_environment
from xray.tasks.command import Command, commanded
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import root_cause
from xray_runtime.kernel.processes import without_collection

if TYPE_CHECKING:
    from xray.tasks.workspace import Workspace


def main(job: Job) -> int:
    """Run `job`; returns the exit code."""
    to_stderr = job.as_json or job.to_stderr
    console, errors = Console(stderr=to_stderr), Console(stderr=True)
    stdout = os.dup(1)
    if to_stderr:
        # Only the JSON goes to stdout, not what a flow or a library prints.
        os.dup2(2, 1)
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    quiet_environment()
    _log_to_file(job.output)
    health = Health()
    try:
        content = _search(job, console, health) if job.search is not None else _run(job, console, health)
    except KeyboardInterrupt:
        return INTERRUPTED
    except NotUpError as error:
        job.ended.write_text(str(error), encoding="utf-8")
        return LOST
    except Exception as error:
        logging.getLogger(__name__).exception("the run failed")
        if health.lost:
            return LOST
        from xray.cli.display import failure_lines

        for line in failure_lines(error, job.output):
            errors.print(escape(line), soft_wrap=True, highlight=False)
        return BAD_INPUT if isinstance(root_cause(error), ConfigError) else FAILED
    if job.as_json:
        with os.fdopen(stdout, "w") as out:
            out.write(json.dumps(content, indent=2) + "\n")
    return 0


def _run(job: Job, console: Console, health: Health) -> dict[str, Any]:
    from xray.cli.display import LiveStages, print_summary

    display = LiveStages(console, job.heartbeat)
    subject = job.subject
    if subject.config is not None and not job.shorten:
        from xray.flows.cached import take_cached

        content = take_cached(subject.config, job.output, job.until, lambda _: job.heartbeat.touch())
        if content is not None:
            print_summary(console, content, job.output)
            return content
    display.note("starting Prefect and Ray")
    opened: list[Workspace] = []
    # Only a person's own flow may use what MLflow does with pandas.
    without = ["pandas"] if subject.config is not None else []
    with services(job.output, health, without), contextlib.ExitStack() as stack:
        # Ray replaced the handler when it started.
        signal.signal(signal.SIGTERM, _interrupt)
        output = str(job.output) if job.replace_output else None

        def watch(workspace: Workspace) -> None:
            opened.append(workspace)
            with job.outputs.open("a", encoding="utf-8") as file:
                file.write(f"{workspace.output}\n")
            # The display calls Ray, so it must stop before Ray does.
            stack.enter_context(display.watching(workspace.progress))

        stack.enter_context(commanded(Command(output, job.until, job.shorten, watch, subject.fields)))
        if subject.config is not None:
            with without_collection():
                from xray.flows.lifecycle import lifecycle

            lifecycle(subject.config, str(job.output), job.until)
        else:
            run_flow(subject.name, subject.parameters)
    if not opened:
        raise ConfigError(f"{subject.name}: the flow must open a workspace")
    for workspace in opened:
        print_summary(console, workspace.run_record.summary.content, workspace.output)
    return opened[-1].run_record.summary.content


def run_flow(name: str, parameters: dict[str, Any]) -> None:
    """Run the flow `module:flow`. Raises ConfigError if its parameters are not allowed."""
    from prefect.exceptions import ParameterTypeError, SignatureMismatchError

    from xray.flows.subject import load_flow

    flow = load_flow(name)
    try:
        if hasattr(flow, "validate_parameters"):
            flow.validate_parameters(parameters)
    except (ParameterTypeError, SignatureMismatchError, TypeError) as error:
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from None
    flow(**parameters)


def _search(job: Job, console: Console, health: Health) -> dict[str, Any]:
    from xray.cli.display import LiveTrials
    from xray.tasks.output_directory import SEARCH

    display = LiveTrials(console, job.heartbeat)
    display.note("starting Prefect and Ray")
    with services(job.output, health):
        from xray.flows.search import SEARCHES, load_search
        from xray.flows.tune import tune_flow
        from xray.flows.tune_report import print_results

        # Ray replaced the handler when it started.
        signal.signal(signal.SIGTERM, _interrupt)
        directory = job.output / SEARCHES / str(job.search)
        search = load_search(directory / SEARCH)
        with display.watching_trials():
            content: dict[str, Any] = tune_flow(display.show_event)(job.subject, search, str(job.output))
    print_results(console, content, search, directory)
    return content


def _interrupt(*_: Any) -> None:
    # A second signal must not interrupt the clean-up.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _log_to_file(output: Path) -> None:
    (output / "logs").mkdir(exist_ok=True)
    handler = logging.FileHandler(output / "logs" / "xray.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    job = Job.model_validate_json(file.read_bytes())
    code = main(job)
    job.ended.touch()
    sys.stdout.flush()
    # Threads of Ray and Prefect must not delay the exit; the supervisor kills the rest.
    os._exit(code)
