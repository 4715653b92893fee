"""`xray export`: a checkpoint and what it was made from, as one archive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xray.cli.options import Output, Ref, Tracking
from xray_runtime.kernel.config.validation import ConfigError

PANEL = "Checkpoints and keys"


def command(
    ref: Ref,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The .tar archive to write.")],
    output: Output = None,
    tracking_uri: Tracking = None,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Write the language model alone, adapters merged, into a new directory BUNDLE."),
    ] = False,
) -> None:
    """Write a checkpoint, its ancestors, their records and the public key to one archive.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import require_language_model, resolve
    from xray_runtime.trust.bundle import export as run_export

    store, node = resolve(ref, output, tracking_uri)
    if merged:
        from xray_runtime.models.merging import write_model

        require_language_model(node)
        try:
            write_model(node.directory, node.sha256, bundle)
        except FileExistsError:
            raise ConfigError(f"BUNDLE: {str(bundle)!r} is not allowed: it exists already") from None
        except ValueError as error:
            raise ConfigError(f"REF: {error}") from error
        print(f"{bundle}: the whole model of {node.name}, in Hugging Face form")
        return
    count = run_export(store, node, bundle)
    print(f"{bundle}: {count} checkpoints; `xray audit {bundle}` checks it")
