"""`xray reviews`: recorded answers are reviewed in MLflow, and what people say there becomes feedback."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from xray.cli.exit_codes import FAILED
from xray.cli.options import AsJson, Root, Tracking
from xray.tasks.output_directory import file_lock, saved_config
from xray_runtime.kernel.config.validation import validate_as
from xray_runtime.live.serving.config import ReviewsConfig

PANEL = "People"
FEEDBACK_KEY = "XRAY_FEEDBACK_KEY"
APPLICATION = "mlflow"


def command(
    output: Root,
    judge: Annotated[
        list[str] | None, typer.Option(help="A person whose assessments count, as MLflow names them; repeatable.")
    ] = None,
    queue: Annotated[str, typer.Option(help="Name of the review queue.")] = "recorded answers",
    limit: Annotated[int, typer.Option(help="Number of the newest answers to show.")] = 500,
    most_of_one: Annotated[
        int, typer.Option(help="Maximum new feedback per judge; the next call takes the rest.")
    ] = 200,
    serve: Annotated[
        str | None,
        typer.Option(help=f"Address of the `xray serve --record` that is running; its key comes from {FEEDBACK_KEY}."),
    ] = None,
    tracking_uri: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Show recorded answers in MLflow's traces and review queue, and take what the judges said there as feedback.

    MLflow stores the texts unencrypted: protect it with a login. Without one, anyone can sign with any name.
    `xray withdraw` removes a person's traces, and the next `xray reviews` those that have expired.
    Exit codes: 0 done, 1 something could not be attributed and was not taken, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import open_lineage_store
    from xray_runtime.live.feedback.mlflow_review import synchronize
    from xray_runtime.live.feedback.recorded_review import keep_feedback

    take = partial(keep_feedback, output, APPLICATION)
    key = os.environ.pop(FEEDBACK_KEY, "")
    if serve is not None:
        from xray.studio.feedback_client import send_feedback

        take = partial(send_feedback, serve.rstrip("/").removesuffix("/v1"), key)
    fields = {"judges": tuple(judge or ()), "queue": queue, "limit": limit, "most_of_one": most_of_one}
    config = validate_as(ReviewsConfig, fields)
    store = open_lineage_store(output, tracking_uri)
    with file_lock(output / "locks", "reviews.lock"):
        done = synchronize(store, saved_config(output).project, config, take)
    if as_json:
        print(json.dumps(asdict(done), indent=2))
    else:
        print(
            f"{done.written} answers and {done.assessed} feedback are new in MLflow, {done.removed} were removed there"
        )
        waits = f"; {done.waiting} wait for the next time" if done.waiting else ""
        print(f"{done.taken} feedback taken from MLflow{waits}")
        print(f"queue {queue!r}: " + ", ".join(f"{count} {status}" for status, count in sorted(done.queue.items())))
    for finding in done.findings:
        print(f"NOT TAKEN {finding}", file=sys.stderr)
    raise typer.Exit(FAILED if done.findings else 0)
