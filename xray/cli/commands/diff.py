"""`xray diff`: the histories of two checkpoints, compared."""

from __future__ import annotations

import json
import sys

from xray.cli.options import AsJson, Output, Ref, Tracking

PANEL = "Evidence"


def command(
    first: Ref, second: Ref, output: Output = None, tracking_uri: Tracking = None, as_json: AsJson = False
) -> None:
    """Compare the histories of two checkpoints: config, data, code, versions, results.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import resolve
    from xray_runtime.trust.diff import diff as compute_diff, diff_text

    content = compute_diff(*resolve(first, output, tracking_uri), *resolve(second, output, tracking_uri))
    if as_json:
        print(json.dumps(content, indent=2))
    else:
        sys.stdout.writelines(line + "\n" for line in diff_text(content))
