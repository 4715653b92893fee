"""`xray witness`: have the log of an output directory cosigned, or cosign the logs of others."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xray.cli.options import By, Root
from xray.deployments.server_home import LOOPBACK, check_free
from xray_runtime.kernel.config.validation import ConfigError

if TYPE_CHECKING:
    from xray_runtime.trust.note import WitnessKey

PANEL = "Checkpoints and keys"
command = typer.Typer(no_args_is_help=True, help="Keep the signed log from being shortened: name a witness, or be one.")


@command.command()
def use(
    address: Annotated[
        str, typer.Argument(metavar="WITNESS", help="A directory, best on another disk, or http[s]://…")
    ],
    output: Root,
    key: Annotated[str | None, typer.Option(help="Public key of a server, which it prints.")] = None,
    by: By = None,
) -> None:
    """Have a witness cosign the log of an output directory from now on.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import open_lineage_store
    from xray_runtime.trust.log import choose_witness
    from xray_runtime.trust.note import WitnessKey

    open_lineage_store(output, None)
    try:
        given = WitnessKey.parse(key) if key is not None else None
    except ValueError as error:
        raise ConfigError(f"--key: {error}") from None
    print(f"{address} cosigns the log of {output}; keep its key for --witness-key of audits:")
    print(choose_witness(output, address, given, by=by or getpass.getuser()))


@command.command()
def serve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where it keeps its key and what it cosigned.")],
    trust: Annotated[
        list[Path] | None, typer.Option(metavar="KEY.pub", help="Key of a log to cosign, remembered; repeatable.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8200,
) -> None:
    """Cosign the logs of others: https://c2sp.org/tlog-witness.

    Exit codes: 0 stopped (Ctrl-C, SIGTERM), 2 bad input.
    """
    from xray_runtime.trust.witness_server import serve as run_serve, trust_log

    def on_ready(key: WitnessKey) -> None:
        print(f"the witness {key} listens on http://{host}:{port}", flush=True)

    check_free(host, "--port", port)
    for path in trust or []:
        trust_log(directory, path)
    run_serve(directory, host, port, on_ready)


@command.command()
def authority(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="http[s]://… of a timestamp authority (RFC 3161).")],
    output: Root,
    certificate: Annotated[Path, typer.Option(metavar="ROOT.pem", help="Its root certificate.")],
    by: By = None,
) -> None:
    """Have a time-stamping authority stamp the log, now and after each decision.

    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import open_lineage_store
    from xray_runtime.kernel.store.checkpoints import read_bounded
    from xray_runtime.trust.log import choose_authority

    open_lineage_store(output, None)
    try:
        pem = read_bounded(certificate).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--certificate: {str(certificate)!r} cannot be read ({type(error).__name__})") from None
    choose_authority(output, address, pem, by=by or getpass.getuser())
    print(f"{address} stamps the log of {output} after each decision")
