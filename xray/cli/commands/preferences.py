"""`xray preferences`: human verdicts as a dataset."""

from __future__ import annotations

import getpass
import json

from xray.cli.conversation import judges_text
from xray.cli.options import AsJson, Root, Tracking
from xray.tasks.output_directory import saved_config

PANEL = "People"


def command(output: Root, tracking_uri: Tracking = None, as_json: AsJson = False) -> None:
    """Publish the verdicts in an output directory as a signed dataset to train reward models on.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import open_lineage_store
    from xray_runtime.live.feedback.publication import publish

    store = open_lineage_store(output, tracking_uri)
    done = publish(store, saved_config(output).project, getpass.getuser())
    if as_json:
        print(json.dumps({"uri": done.checkpoint.uri, "sha256": done.checkpoint.sha256} | done.stats, indent=2))
        return
    counts = done.stats
    print(f"{counts['pairs']} pairs from {counts['judgements']} judgements by {judges_text(counts['judges'])}")
    if done.heldout:
        print(f"{done.heldout} of them are on held-out prompts, which are never trained on")
    print(f"{'published' if done.is_new else 'already published'}: {done.checkpoint.uri}")
    print(f"train on it: xray run CONFIG --set preferences.source=dataset --set preferences.path={done.checkpoint.uri}")
