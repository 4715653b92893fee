"""`xray fetch`: checkpoints from the shared store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from xray.cli.exit_codes import FAILED
from xray.tasks.output_directory import saved_config
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.credentials import has_login, strip_credentials

PANEL = "Checkpoints and keys"
PATIENCE_S = 20.0
"""Timeout of `fetch` for the shared store."""


def command(
    output: Annotated[Path, typer.Option(help="Output directory to import into.")],
    storage: Annotated[
        str | None, typer.Option(help="URL of the shared store. Default: the one of the directory's last run.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every checkpoint in the store, not only those lifecycle.json names.")
    ] = False,
) -> None:
    """Fetch missing or damaged checkpoints from the shared store, if a key that is trusted here signed them.

    Exit codes: 0 all are present and sound, 1 the store lacks some, 2 bad input.
    """
    from xray_runtime.kernel.evidence.log import LIFECYCLE
    from xray_runtime.kernel.store.checkpoints import CHECKPOINTS, verify
    from xray_runtime.kernel.store.identity import file_sha256
    from xray_runtime.kernel.store.manifest import MANIFEST
    from xray_runtime.kernel.store.shared import SharedStore, StorageError, is_safe
    from xray_runtime.trust.attestation import open_store
    from xray_runtime.trust.keys import exchange_keys
    from xray_runtime.trust.log import log_checkpoints

    if storage is not None and has_login(storage):
        raise ConfigError(
            f"--storage: a login in {strip_credentials(storage)!r} is not allowed: credentials come from the "
            "environment"
        )
    output = output.absolute()
    url = storage or saved_config(output).runtime.storage
    if url is None:
        raise ConfigError("--storage: is not set, and the directory's config.yaml names no store; give its URL")
    try:
        shared = SharedStore(url, PATIENCE_S)
        names = shared.names(CHECKPOINTS) if everything else _recorded(output)
        output.mkdir(parents=True, exist_ok=True)
        exchange_keys(output, shared)
        store, missing = open_store(output, shared), []
        for name in names:
            if "/" in name or not is_safe(name):
                raise ConfigError(f"--output: {name[:80]!a} in its {LIFECYCLE} is not allowed: is no checkpoint's name")
            directory = store.root / name
            # Every byte is read: remembered digests do not notice damaged bits.
            sound = not verify(directory) and store.is_sound(directory)
            fetched = not sound and store.fetch(directory)
            if not sound and not fetched:
                missing.append(name)
            if fetched:
                log_checkpoints(output, {name: file_sha256(directory / MANIFEST)}, here=False)
            print(f"{'present' if sound else 'fetched' if fetched else 'missing'}  {name}")
    except StorageError as error:
        raise ConfigError(f"--storage: {error}") from None
    raise typer.Exit(FAILED if missing else 0)


def _recorded(output: Path) -> list[str]:
    """Names of the checkpoint directories in lifecycle.json."""
    from xray_runtime.kernel.evidence.log import LIFECYCLE

    path = output / LIFECYCLE
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))["stages"]
        return [f"{stage['name']}-{stage['key'][:12]}" for stage in stages]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--output: there is no {LIFECYCLE} in {str(output)!r} to list checkpoints; use --all"
        ) from None
