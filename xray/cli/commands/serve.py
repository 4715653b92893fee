"""`xray serve`: an OpenAI-compatible server for a model, which can follow the champion.

This process audits and chooses models; HAProxy and the replicas answer requests. All processes that it starts have its
process tag and end with it, even after SIGKILL.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xray.cli.errors import print_error
from xray.cli.exit_codes import FAILED
from xray.cli.options import Output, PublicKey, Tracking
from xray.cli.serve_recording import RecordingOptions, recording_lock, recording_options, start
from xray.deployments.local_ray import running_ray
from xray.deployments.local_services import Health
from xray.deployments.server_home import LOOPBACK, check_free, clients_address
from xray.tasks.output_directory import saved_config
from xray.tasks.preflight import check_ray_address
from xray_runtime.kernel.config.extras import require_extra
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.network import is_loopback
from xray_runtime.kernel.processes import kill_tagged, start_reaper
from xray_runtime.kernel.terminal import say
from xray_runtime.live.serving import NotServedError

if TYPE_CHECKING:
    from xray_runtime.live.serving.choice import ModelChoice
    from xray_runtime.live.serving.replica import ServedAdapter
    from xray_runtime.live.serving.server import ModelServer

PANEL = "Champion"
API_KEY = "XRAY_API_KEY"
POLL_SECONDS = 2.0
STOPS = (signal.SIGINT, signal.SIGTERM)


def command(
    ref: Annotated[
        str,
        typer.Argument(
            metavar="[REF]", help="`champion` or NAME@champion, which follow promotions; or a REF as in `xray lineage`."
        ),
    ] = "champion",
    output: Output = None,
    host: Annotated[
        str, typer.Option(help=f"Address to listen on; other than loopback needs a key in {API_KEY}.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    replicas: Annotated[int, typer.Option(min=1, max=1024, help="Number of engines that share the requests.")] = 1,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, max=64, help="Number of devices that each engine is split across.")
    ] = 1,
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=REF", help="Serve this adapter on REF's model by NAME; repeatable."),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Keep answers to people who agreed, encrypted and signed: docs/serving.md.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="With --record: set one of its rules; repeatable."),
    ] = None,
    tracking_uri: Tracking = None,
    public_key: PublicKey = None,
) -> None:
    """Serve a model whose audit is sound, OpenAI-compatible; follow the champion without a pause.

    With --record it also follows canaries of `xray flywheel`: a share of the users (header `x-xray-user`, else
    `x-xray-conversation`) is answered by the candidate, and by the champion again once that is decided.

    Exit codes: 0 stopped (Ctrl-C, SIGTERM), 1 refused, 2 bad input.
    """
    require_extra("live")
    for number in STOPS:
        signal.signal(number, signal.default_int_handler)
    # Child processes inherit the environment and must not get the key.
    key = os.environ.pop(API_KEY, None) or None
    recording = recording_options(record, overrides or [], key)
    network = host, port, replicas, tensor_parallel, key
    _serve_until_stopped(_Options(ref, output, tracking_uri, public_key, *network, recording, adapters or []))


def _serve_until_stopped(options: _Options) -> None:
    try:
        name, choice = _choose(options)
        beside = _adapters(options, name, choice)
        tag = start_reaper()
        try:
            _run(options, name, choice, beside)
        finally:
            for number in STOPS:
                signal.signal(number, signal.SIG_IGN)
            kill_tagged(tag)
    except NotServedError as error:
        print_error("refused", str(error))
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        say("stopped at once")


@dataclass(frozen=True)
class _Options:
    ref: str
    output: Path | None
    tracking_uri: str | None
    public: Path | None
    host: str
    port: int
    replicas: int
    tensor_parallel: int
    key: str | None
    recording: RecordingOptions | None
    adapters: list[str]


def _choose(options: _Options) -> tuple[str | None, ModelChoice]:
    """(registered model whose champion is followed or None, the model to serve first), after its audit."""
    from xray_runtime.live.serving.choice import champion, fixed, followed, require_sound, require_splittable

    if not is_loopback(options.host) and options.key is None:
        raise ConfigError(f"--host: {options.host!r} is not allowed without a key: set {API_KEY}")
    if options.public is not None and not options.public.is_file():
        raise ConfigError(f"--public-key: {str(options.public)!r} is not a file")
    check_free(options.host, "--port", options.port)
    check_ray_address()
    name = followed(options.ref, options.output)
    if name is None:
        choice = fixed(options.ref, options.output, options.tracking_uri)
    else:
        assert options.output is not None
        choice = champion(name, options.output, options.tracking_uri)
    saved_config(choice.store.output)
    require_splittable(choice, options.tensor_parallel)
    require_sound(choice, options.public)
    return name, choice


def _adapters(options: _Options, name: str | None, choice: ModelChoice) -> tuple[ServedAdapter, ...]:
    """The adapters to serve beside `choice`, after their audits."""
    if not options.adapters:
        return ()
    from xray_runtime.live.serving.adapters import chosen_adapters

    if name is not None:
        raise ConfigError(f"--adapter: needs a REF that names one checkpoint, their base, not {options.ref!r}")
    if options.recording is not None:
        raise ConfigError("--adapter: is not allowed with --record, which keeps the answers of one model")
    return chosen_adapters(options.adapters, choice, options.output, options.tracking_uri, options.public)


def _run(options: _Options, name: str | None, choice: ModelChoice, beside: tuple[ServedAdapter, ...]) -> None:
    with recording_lock(options.recording, choice.store), running_ray(), Health().watching(None):
        # Ray replaced the handler when it started.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        from xray_runtime.live.serving.server import ModelServer

        recorder = start(options.recording, choice.store, _logs(choice)) if options.recording is not None else None
        server = ModelServer(options.host, options.port, options.replicas, _logs(choice), recorder)
        try:
            _serve(server, options, name, choice, beside)
        except KeyboardInterrupt:
            say("finishing the current requests; press Ctrl-C again to stop at once")
        finally:
            server.stop()
    say("stopped")


def _logs(choice: ModelChoice) -> Path:
    return choice.store.output.absolute() / "logs" / "serve"


def _serve(
    server: ModelServer, options: _Options, name: str | None, choice: ModelChoice, beside: tuple[ServedAdapter, ...]
) -> None:
    from xray_runtime.cluster.pool.placement import device
    from xray_runtime.kernel.evidence.log import view
    from xray_runtime.kernel.history.reference import CHAMPION
    from xray_runtime.live.serving.canary import CanaryFollower
    from xray_runtime.live.serving.choice import Follower
    from xray_runtime.live.serving.middleware import key_digest
    from xray_runtime.live.serving.replica import ServedModel

    store = choice.store
    runtime = saved_config(store.output).runtime

    def model(choice: ModelChoice) -> ServedModel:
        return ServedModel(
            directory=choice.node.directory.absolute(),
            sha256=choice.node.sha256,
            names=choice.names,
            tensor_parallel=options.tensor_parallel,
            runtime=runtime,
            device=device(runtime),
            key=key_digest(options.key) if options.key else None,
            logs=_logs(choice),
            adapters=beside,
        )

    server.deploy(model(choice))
    named = "".join(f", {each.name}" for each in beside)
    say(f"serving {choice.title}{named} at http://{clients_address(options.host)}:{options.port}/v1")
    if name is None:
        threading.Event().wait()
        return
    follower = Follower(name, store.output, store.tracking_uri, options.public, choice.node.sha256)
    records = options.recording is not None
    canary = CanaryFollower(server, store, name, model, records, options.public)
    while True:
        time.sleep(POLL_SECONDS)
        # A champion that is replaced ends its canary before the next model is loaded.
        decided = view(store.output).decided.get((name, CHAMPION))
        if news := canary.step(decided.checkpoint if decided is not None else ""):
            say(f"{_now()} {news}")
        try:
            new_champion = follower.next_champion()
            if new_champion is None:
                continue
            say(f"{_now()} {new_champion.title} is the new champion and its audit is sound: loading it")
            server.deploy(model(new_champion))
        except NotServedError as error:
            print_error("refused", f"{error}; still serving {choice.title}")
            continue
        choice = new_champion
        follower.serving = choice.node.sha256
        say(f"{_now()} serving {choice.title}")


def _now() -> str:
    return datetime.now().isoformat(sep=" ", timespec="seconds")
