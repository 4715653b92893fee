"""`xray keys`: show the keys that sign records, trust those of others, and rotate one's own."""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from xray.cli.options import By, Root
from xray.tasks.output_directory import file_lock, require_no_run
from xray_runtime.kernel.config.validation import ConfigError

PANEL = "Checkpoints and keys"
command = typer.Typer(no_args_is_help=True, help="Show, trust or rotate the keys that sign records.")


@command.command()
def show(output: Root) -> None:
    """List every trusted key, and until when it signed.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.trust.keys import trusted_keys

    with _bad_input():
        for key in trusted_keys(output):
            print(f"{key.sha256}  {'signs' if key.until is None else f'retired {key.until.isoformat()}'}  {key.path}")


@command.command()
def trust(
    key: Annotated[Path, typer.Argument(metavar="KEY", help="Public key in PEM, whose owner you know.")],
    output: Root,
) -> None:
    """Trust what the owner of another key signed: checkpoints of a shared store, another directory or a bundle.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.trust.keys import trust as run_trust

    print(f"{output} trusts {run_trust(output, key)}")


@command.command()
def rotate(
    output: Root,
    note: Annotated[str, typer.Option(help="Your reason; it is recorded with the change.")],
    by: By = None,
    new_key: Annotated[
        Path | None, typer.Option(help="File of the new key, if kept elsewhere; it is created if missing.")
    ] = None,
) -> None:
    """Sign with a new key from now on; earlier signatures stay valid.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import open_lineage_store
    from xray_runtime.trust.keys import rotate as run_rotate
    from xray_runtime.trust.signing import public_key

    open_lineage_store(output, None)
    with file_lock(output), _bad_input():
        require_no_run(output)
        rotation = run_rotate(output, by=by or getpass.getuser(), note=note, new_key=new_key)
    print(f"{rotation.retired[:16]} retired, {rotation.successor[:16]} signs from now on")
    print(f"keep a copy of {public_key(output)} elsewhere")
    if new_key is not None:
        print(f"set XRAY_SIGNING_KEY={new_key.absolute()} from now on")


@contextlib.contextmanager
def _bad_input() -> Iterator[None]:
    """An unusable public key is bad input."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None
