"""`xray keys`: which keys sign and are trusted, and putting a new one in place."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from xray.cli.lineage import checked
from xray.tasks.output_directory import file_lock, require_no_run
from xray_runtime.config.validation import ConfigError

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, help="Show the keys that sign records, or rotate them.")

Output = Annotated[Path, typer.Option("--output", help="Output directory of lifecycles.")]


@app.command()
def show(output: Output) -> None:
    """Every trusted key, and until when it signed.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.lineage.keys import trusted_keys

    for key in checked(lambda: _usable(lambda: trusted_keys(output))):
        print(f"{key.sha256}  {'signs' if key.until is None else f'retired {key.until.isoformat()}'}  {key.path}")


@app.command()
def rotate(
    output: Output,
    note: Annotated[str, typer.Option("--note", help="Your reason; it is recorded with the change.")],
    by: Annotated[
        str | None, typer.Option("--by", help="Your name; it is recorded, not checked. Default: this user.")
    ] = None,
    new_key: Annotated[
        Path | None,
        typer.Option("--new-key", help="PEM file of the new key, if kept elsewhere; it is created if missing."),
    ] = None,
) -> None:
    """A new key signs from now on; what was signed before stays good.

    Exit codes: 0 done, 2 bad input.
    """
    checked(lambda: _rotate(output, by or getpass.getuser(), note, new_key))


def _usable(call: Callable[[], T]) -> T:
    """What `call` returns; a public key that cannot be used is bad input."""
    try:
        return call()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _rotate(output: Path, by: str, note: str, new_key: Path | None) -> None:
    from xray_runtime.lineage.keys import rotate as run_rotate
    from xray_runtime.lineage.reference import open_lineage_store
    from xray_runtime.lineage.signing import public_key

    open_lineage_store(output, None)
    with file_lock(output):
        require_no_run(output)
        rotation = _usable(lambda: run_rotate(output, by=by, note=note, new_key=new_key))
    print(f"{rotation.retired[:16]} retired, {rotation.successor[:16]} signs from now on")
    print(f"keep a copy of {public_key(output)} elsewhere")
    if new_key is not None:
        print(f"set XRAY_SIGNING_KEY={new_key.absolute()} from now on")
