"""`xray generator`: a vLLM server that samples for runs elsewhere."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from xray.deployments.server_home import LOOPBACK, check_free
from xray_runtime.kernel.config.loading import parse_overrides
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.kernel.config.validation import ConfigError, validate_as
from xray_runtime.kernel.network import is_loopback
from xray_runtime.kernel.terminal import say

PANEL = "Servers"


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or hub name: a model of the run's shape.")],
    max_length: Annotated[int, typer.Option(min=2, help="Longest prompt and reply together, in tokens.")] = 2048,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback needs a key in XRAY_API_KEY.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8100,
    tensor_parallel: Annotated[int, typer.Option(min=1, max=64, help="Number of devices that share the model.")] = 1,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="A field of `runtime`; repeatable.")
    ] = None,
) -> None:
    """Sample for runs elsewhere, which name this server in `generator.addresses` and push weights to it.

    Exit codes: 0 stopped (Ctrl-C, SIGTERM), 1 failed, 2 bad input.
    """
    runtime = validate_as(RuntimeConfig, parse_overrides(overrides or []), "--set")
    # Before torch is imported.
    from xray_runtime.cluster.pool.libraries import prepare_imports

    prepare_imports(runtime.threads)
    from xray_runtime.cluster.workhorse import resolve_device
    from xray_runtime.engines.generators.server import launch

    if not is_loopback(host) and not os.environ.get(launch.KEY):
        raise ConfigError(f"--host: {host!r} is not allowed without a key: set {launch.KEY}")
    check_free(host, "--port", port)
    try:
        directory = launch.find_model(model)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    device = resolve_device(runtime.device)
    line = launch.arguments(directory, (host, port), max_length, runtime, device, tensor_parallel)
    say(f"starting a generator for {model} on http://{host}:{port}; it answers in a minute")
    launch.serve(line, runtime, device)
