"""`xray tune`: checks the search, then runs it under the supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from xray.cli.options import Overrides, Target
from xray.cli.supervisor import supervise
from xray.flows.search import SEARCHES, load_search
from xray.flows.subject import output_directory, read_subject
from xray.tasks.output_directory import CONFIG, SEARCH, file_lock
from xray.tasks.preflight import check_before_start, check_ray_address
from xray_runtime.kernel.config.extras import require_extra
from xray_runtime.kernel.config.loading import to_yaml
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.files import write_atomic
from xray_runtime.methods.loading import resolved_yaml

PANEL = "Run"


def command(
    target: Target,
    search: Annotated[Path, typer.Option("--search", help="YAML file with the fields, their ranges and the metric.")],
    overrides: Overrides = None,
    trials: Annotated[int | None, typer.Option("--trials", help="Number of trials. Default: the search's.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Directory for everything the trials write. Default: runs/<name>.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json to stdout, all else to stderr.")] = False,
) -> None:
    """Search over fields of a config, or of a flow and its stages: shared stages are computed once.

    Run the same command again to continue; a larger --trials adds trials.

    Exit codes: 0 done, 1 no trial finished, 2 bad input, 130 interrupted.
    """
    require_extra("ops")
    from xray.flows.study import search_space

    subject, wanted = read_subject(target, overrides or []), load_search(search, trials)
    try:
        search_space(subject, wanted)
    except ConfigError as error:
        raise ConfigError(f"{search}: {error}") from None
    root = output_directory(target, output)
    check_ray_address()
    graph = subject.recorded()
    check_before_start(graph, root)
    directory = root / SEARCHES / wanted.name
    directory.mkdir(parents=True, exist_ok=True)
    with file_lock(directory):
        if subject.config is not None:
            write_atomic(directory / CONFIG, resolved_yaml(subject.config))
        write_atomic(directory / SEARCH, to_yaml(wanted.model_dump(mode="json")))
        console = Console(stderr=as_json)
        code = supervise(root, subject, graph.runtime, console, search=wanted.name, as_json=as_json)
    raise typer.Exit(code)
