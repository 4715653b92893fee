"""`xray studio`: pages over an output directory."""

from __future__ import annotations

import getpass
import os
import secrets
import threading
from typing import Annotated
from urllib.parse import urlsplit

import typer

from xray.cli.options import By, PublicKey, Root, Tracking
from xray.deployments.server_home import LOOPBACK, check_free, clients_address
from xray_runtime.kernel.config.extras import require_extra
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.network import is_loopback
from xray_runtime.kernel.terminal import say

PANEL = "People"
API_KEY, FEEDBACK_KEY = "XRAY_API_KEY", "XRAY_FEEDBACK_KEY"


def command(
    output: Root,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback demands a login.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8100,
    serve: Annotated[
        str | None, typer.Option(help=f"Address of `xray serve`, to chat with its model; its key comes from {API_KEY}.")
    ] = None,
    audit_every: Annotated[
        float | None,
        typer.Option(min=1, metavar="MINUTES", help="Audit everything this often, for the alerts on /metrics."),
    ] = None,
    by: By = None,
    tracking_uri: Tracking = None,
    public_key: PublicKey = None,
) -> None:
    """Serve pages for runs, rollouts, lineage, evaluations, review of answers, promotion, withdrawals and a chat.

    Exit codes: 0 stopped (Ctrl-C), 2 bad input.
    """
    require_extra("studio")
    from xray_runtime.kernel.history.reference import open_lineage_store

    # Child processes inherit the environment and must not get the keys.
    key, feedback_key = os.environ.pop(API_KEY, ""), os.environ.pop(FEEDBACK_KEY, "")
    if serve is not None and urlsplit(serve).scheme not in ("http", "https"):
        raise ConfigError(f"--serve: {serve!r} is not allowed: must be an address such as http://127.0.0.1:8000")
    if public_key is not None and not public_key.is_file():
        raise ConfigError(f"--public-key: {str(public_key)!r} is not a file")
    open_lineage_store(output, tracking_uri)
    check_free(host, "--port", port)

    import uvicorn

    from xray.studio.access import Access
    from xray.studio.app import make_app
    from xray.studio.studio import Studio

    token = None if is_loopback(host) else secrets.token_urlsafe(32)
    shown = Studio(
        output=output.absolute(),
        by=by or getpass.getuser(),
        tracking_uri=tracking_uri,
        public=public_key,
        serve=serve.rstrip("/").removesuffix("/v1") if serve is not None else None,
        serve_key=key,
        feedback_key=feedback_key,
    )
    say(f"the studio of {output} is at http://{clients_address(host)}:{port}; Ctrl-C stops it")
    if token is not None:
        say(f"log in with the token {token}")
        say("the connection is not encrypted: put a proxy with TLS before it where others can listen")
    if audit_every is not None:
        threading.Thread(target=shown.audit_every, args=(audit_every * 60,), daemon=True).start()
    uvicorn.run(make_app(shown, Access(token)), host=host, port=port, log_level="warning", server_header=False)
