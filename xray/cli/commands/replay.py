"""`xray replay`: whether a stage, or an iteration in a bundle, gives the same bytes again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from xray.cli.exit_codes import FAILED
from xray.cli.options import AsJson, Output, PublicKey, Tracking
from xray.cli.replaying import Modules, changes, identity_now, opened, scratch_directory, show_changes, summary
from xray.flows.subject import import_modules
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.terminal import print_table

PANEL = "Evidence"


def command(
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="Checkpoint as in `xray lineage`, or a bundle of `xray bundle`.")
    ],
    iteration: Annotated[
        int | None,
        typer.Option(min=0, help="Last iteration of PPO to recompute, counted from 0. Default: the whole stage."),
    ] = None,
    modules: Modules = None,
    output: Output = None,
    tracking_uri: Tracking = None,
    public_key: PublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Recompute a stage from its inputs (PPO: up to an iteration) and compare every byte.

    Rollouts are compared with the ledger, weights with the digests in it, and at the end of the stage every file with
    the checkpoint's. A bundle's iteration is recomputed alone, and each of its parts compared. Exit codes: 0 the same,
    1 different (the first difference is named) or failed, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import resolve
    from xray_runtime.trust.replay import replay as run_replay
    from xray_runtime.trust.replayable import replayable

    import_modules(modules or [])
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    if Path(ref).is_file():
        if (iteration, output, tracking_uri) != (None, None, None):
            raise ConfigError("--iteration, --output, --tracking-uri: not for a bundle, which has one iteration")
        _replay_bundle(Path(ref), public_key, console, as_json)
    if public_key is not None:
        raise ConfigError("--public-key: is for a bundle; `xray audit` checks the signatures of an output directory")
    store, node = resolve(ref, output, tracking_uri)
    stage = replayable(node, store.graph, iteration)
    with scratch_directory(store.output) as scratch:
        changed = changes(stage, identity_now(stage, scratch))
        show_changes(console, changed)
        with opened(stage, scratch, console) as (open_models, show):
            result = run_replay(stage, iteration, open_models, scratch, show)
    if as_json:
        print(json.dumps(result.to_json() | {"changes": changed}, indent=2))
    else:
        for line in summary(result):
            console.print(Text(line))
    raise typer.Exit(0 if result.is_same else FAILED)


def _replay_bundle(path: Path, public: Path | None, console: Console, as_json: bool) -> NoReturn:
    from xray_runtime.trust.bundle import UNKNOWN_KEY
    from xray_runtime.trust.iteration.bundle import BundleProblem, open_iteration
    from xray_runtime.trust.iteration.replay import replay_iteration, without_sampler
    from xray_runtime.trust.signing import read_public

    if public is not None:
        if not public.is_file():
            raise ConfigError(f"--public-key: {str(public)!r} is not a file")
        try:
            read_public(public)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--public-key: {first_line(error)}") from None
    try:
        with open_iteration(path, public) as bundle, scratch_directory(None) as scratch:
            stage, now = bundle.stage, identity_now(bundle.stage, scratch)
            changed = changes(stage, now)
            show_changes(console, changed)
            there = set(stage.node.manifest.identity.versions)
            missing = [] if isinstance(now, str) else sorted(there - set(now.versions))
            recorded = without_sampler(bundle, missing)
            with opened(stage, scratch, console) as (open_models, show):
                result = replay_iteration(bundle, open_models, scratch, show, recorded)
            name = stage.node.name
    except BundleProblem as problem:
        if as_json:
            print(json.dumps({"same": False, "findings": problem.findings}, indent=2))
        for finding in problem.findings:
            console.print(Text(f"BROKEN {finding}"))
        console.print(Text("nothing was replayed: the bundle is not what was signed"))
        raise typer.Exit(FAILED) from None
    if as_json:
        print(json.dumps(result.to_json() | {"signer": bundle.signer, "changes": changed}, indent=2))
    else:
        print_table(console, ("part", "", ""), [(part.name, part.verdict, part.note) for part in result.parts])
        what = f"iteration {result.iteration} of {name}"
        console.print(Text(f"{what}: the same bytes" if result.is_same else f"{what}: DIFFERENT"))
        if public is None:
            console.print(Text(UNKNOWN_KEY))
    raise typer.Exit(0 if result.is_same else FAILED)
