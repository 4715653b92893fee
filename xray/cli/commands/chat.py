"""`xray chat`: chat with a checkpoint, optionally in an environment, at a terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from xray.cli.conversation import MaxNewTokens, Seed, Temperature, audit_summary, sampling_of, shown, typed
from xray.cli.exit_codes import BAD_INPUT
from xray.cli.options import Output, Ref, Tracking
from xray.flows.subject import add_working_directory
from xray.tasks.output_directory import saved_config
from xray_runtime.kernel.config.validation import ConfigError, validate_as

if TYPE_CHECKING:
    from xray_runtime.agents.environments.pool import EnvironmentPool
    from xray_runtime.data.pairs import Messages
    from xray_runtime.kernel.history.graph import Node
    from xray_runtime.kernel.history.reference import LineageStore
    from xray_runtime.methods.common.environment import EnvironmentConfig
    from xray_runtime.methods.common.environment_protocol import Step

PANEL = "People"


def command(
    ref: Ref,
    output: Output = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    environment: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="Environment that answers replies, as in training.")
    ] = None,
    tracking_uri: Tracking = None,
) -> None:
    """Chat with a checkpoint, under the chat template it was trained with. Ctrl-D ends.

    Its audit is shown first. In a pipe each input line is a turn, and stdout has a line for each reply. With an
    environment each message starts an episode; text the policy reads between its replies is in brackets.
    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.kernel.history.reference import resolve

    store, node = resolve(ref, output, tracking_uri)
    _chat(store, node, temperature, max_new_tokens, seed, _environment(node, environment))


def _environment(node: Node, path: str | None) -> EnvironmentConfig | None:
    """The environment at `path`, with the limits that the checkpoint was trained under, if any."""
    from xray_runtime.kernel.config.allowed_imports import check_import
    from xray_runtime.methods.common.environment import EnvironmentConfig

    if path is None:
        return None
    trained = node.manifest.config.get("environment") or {}
    trained = trained if "path" in trained else {}  # an agent has other limits
    config = validate_as(EnvironmentConfig, trained | {"path": path}, "--environment")
    try:
        check_import(path)
    except ValueError as error:
        raise ConfigError(f"--environment: {error}") from None
    return config


def _pool(config: EnvironmentConfig | None) -> AbstractContextManager[EnvironmentPool | None]:
    from xray_runtime.agents.environments.pool import EnvironmentPool

    if config is None:
        return nullcontext()
    add_working_directory()
    try:
        return EnvironmentPool(config.path, 1, config.timeout_s, config.memory_mb)
    except RuntimeError as error:
        raise ConfigError(f"--environment: {error}") from None


def _chat(
    store: LineageStore,
    node: Node,
    temperature: float | None,
    max_new_tokens: int | None,
    seed: int,
    environment: EnvironmentConfig | None,
) -> None:
    from xray_runtime.cluster.pool.machine import this_machine
    from xray_runtime.kernel.history.reference import require_language_model
    from xray_runtime.kernel.seeding import derive_seed
    from xray_runtime.live.feedback.chat_episode import play
    from xray_runtime.live.feedback.chat_model import (
        ChatModel,
        PromptLimits,
        last_messages,
        trained_columns,
        trained_context,
    )
    from xray_runtime.trust.audit.checkpoints import audit

    require_language_model(node)
    config = saved_config(store.output)
    temperature, max_new_tokens = sampling_of(config, temperature, max_new_tokens)
    limits = PromptLimits(node.directory, max_new_tokens, temperature)
    stderr = Console(stderr=True, highlight=False, soft_wrap=True)
    stderr.print(Text(f"{node.name}  {node.sha256}", style="bold"))
    with stderr.status("auditing"):
        result = audit(store, [node])
    stderr.print(audit_summary(result))
    context = trained_context(store.graph, node)
    scope = f"the last {context} message(s), as in its training data" if context is not None else "the conversation"
    stderr.print(f"it sees {scope}; up to {max_new_tokens} tokens a reply at temperature {temperature:g}", style="dim")
    columns = trained_columns(store.graph, node) if environment is not None else []
    if columns:
        lacking = f"{', '.join(columns)}: columns of its training data that chat messages lack"
        stderr.print(Text(f"{lacking}; an episode fails if its environment reads one", style="yellow"))
    with _pool(environment) as pool:
        with stderr.status("loading"):
            model = ChatModel(node.directory, limits, this_machine(config.runtime.device).device)
        max_turns = environment.max_turns if environment is not None else 1
        history: Messages = []
        for turn, line in enumerate(_lines()):
            prompt = limits.cut(last_messages([*history, {"role": "user", "content": typed(line)}], context))
            events = play(model, limits, prompt, derive_seed(seed, "chat", turn), pool, max_turns)
            reply = _show(events, stderr)
            if reply is not None:
                history = [*prompt, {"role": "assistant", "content": reply}]


def _lines() -> Iterator[str]:
    """Lines of input, without blank ones."""
    terminal = sys.stdin.isatty()
    if terminal:
        # With readline, arrow keys edit the line.
        import readline  # noqa: F401
    try:
        while line := (input("\n> ") + "\n" if terminal else sys.stdin.readline()):
            if line.strip():
                yield line
    except (EOFError, KeyboardInterrupt):
        print()


def _show(events: Iterator[str | Step], stderr: Console) -> str | None:
    """Print replies as they arrive, and the environment's answers; returns the last reply, if there is one.

    Ctrl-C ends the reply, not the conversation.
    """
    from xray_runtime.agents.environments.episodes import EnvironmentFailure

    console = Console(highlight=False, soft_wrap=True)
    pieces: list[str] = []
    ended = True
    try:
        for event in events:
            if isinstance(event, str):
                pieces = [event] if ended else [*pieces, event]
                ended = False
                # Programs that read from a pipe count lines.
                text = shown(event) if console.is_terminal else shown(event).replace("\n", " ")
                console.print(Text(text, style="cyan"), end="")
            else:
                console.print()
                ended = True
                _show_step(event, stderr)
    except KeyboardInterrupt:
        console.print("…", end="")
        ended = False
    except EnvironmentFailure as error:
        stderr.print(Text(f"the environment failed: {shown(str(error))}", style="red"))
    except ValueError as error:
        stderr.print(Text(str(error), style="red"))
        if not sys.stdin.isatty():
            raise typer.Exit(BAD_INPUT) from None
    if not ended:
        console.print()
    return "".join(pieces) if pieces else None


def _show_step(step: Step, stderr: Console) -> None:
    for message in step.messages:
        stderr.print(Text(f"[{shown(message['content'])}]", style="dim"))
    if step.reward or step.terminated or step.truncated:
        stderr.print(Text(f"[reward {step.reward:g}]", style="dim"))
