"""`xray chat`: a conversation with a checkpoint at the terminal, or a line a turn through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from xray.cli.lineage import BAD_INPUT, Output, Ref, Tracking, checked
from xray.tasks.output_directory import saved_config
from xray_runtime.config.lifecycle import LifecycleConfig
from xray_runtime.config.validation import ConfigError

if TYPE_CHECKING:
    from xray_runtime.data.pairs import Messages
    from xray_runtime.feedback.chat_model import ChatModel
    from xray_runtime.lineage.audit.checkpoints import Audit
    from xray_runtime.lineage.graph import Node
    from xray_runtime.lineage.reference import LineageStore

Temperature = Annotated[
    float | None, typer.Option("--temperature", help="Of sampling. Default: as the evaluation samples.")
]
MaxNewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", min=1, help="Longest reply. Default: as the evaluation samples.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of everything that is drawn.")]


def chat(
    ref: Ref,
    output: Output = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 0,
    tracking_uri: Tracking = None,
) -> None:
    """Talk with a checkpoint, under the chat template it was trained with. Ctrl-D ends.

    Its audit stands at the top. Through a pipe each line is a turn; stdout then holds a line for each reply.
    Exit codes: 0 done, 2 bad input.
    """
    from xray_runtime.lineage.reference import resolve

    place, node = checked(lambda: resolve(ref, output, tracking_uri))
    checked(lambda: _chat(place, node, temperature, max_new_tokens, seed))


def sampling_of(config: LifecycleConfig, temperature: float | None, max_new_tokens: int | None) -> tuple[float, int]:
    """(temperature, longest reply in tokens): what was given, else what the evaluation samples with.

    Raises:
        ConfigError: the temperature is not above 0.
    """
    if temperature is not None and not 0 < temperature < float("inf"):
        raise ConfigError(f"--temperature: {temperature:g} is not allowed: must be greater than 0")
    return temperature or config.evaluate.temperature, max_new_tokens or config.evaluate.max_new_tokens


def audit_words(result: Audit) -> Text:
    """What an audit found, in a line."""
    from xray_runtime.lineage.render import printable

    if result.is_sound:
        return Text(f"audit: sound, {result.checkpoints} checkpoints, {result.files} files", style="green")
    first = next(finding for finding in result.findings if finding.is_broken)
    text = f"audit: NOT SOUND: {first.code}: {first.subject}: {first.detail}"
    return Text(f"{printable(text)}; `xray audit` says all", style="bold red")


def shown(text: str) -> str:
    """A model's text without what could move the cursor or colour the terminal."""
    from xray_runtime.lineage.render import printable

    return "\n".join(printable(line) for line in text.split("\n"))


def typed(line: str) -> str:
    """What was typed, to the letter; bytes that are no text become "?"."""
    return line.removesuffix("\n").encode("utf-8", "replace").decode()


def _chat(place: LineageStore, node: Node, temperature: float | None, max_new_tokens: int | None, seed: int) -> None:
    from xray_runtime.feedback.chat_model import ChatModel, PromptLimits, last_messages, trained_context
    from xray_runtime.lineage.audit.checkpoints import audit
    from xray_runtime.lineage.reference import require_language_model
    from xray_runtime.planning.workload import this_machine
    from xray_runtime.seeding import derive_seed

    require_language_model(node)
    config = saved_config(place.output)
    temperature, max_new_tokens = sampling_of(config, temperature, max_new_tokens)
    limits = PromptLimits(node.directory, max_new_tokens, temperature)
    words = Console(stderr=True, highlight=False, soft_wrap=True)
    words.print(Text(f"{node.name}  {node.sha256}", style="bold"))
    with words.status("auditing it"):
        result = audit(place, [node])
    words.print(audit_words(result))
    context = trained_context(place.graph, node)
    seen = f"the last {context} message(s), as in its training data" if context is not None else "the conversation"
    words.print(f"it sees {seen}; up to {max_new_tokens} tokens a reply at temperature {temperature:g}", style="dim")
    with words.status("loading it"):
        speaker = ChatModel(node.directory, limits, this_machine(config.runtime.device).device)
    history: Messages = []
    for turn, line in enumerate(_lines()):
        said = typed(line)
        prompt = limits.cut(last_messages([*history, {"role": "user", "content": said}], context))
        excess = limits.excess(prompt)
        if excess > 0:
            words.print(f"too long for the model by {excess} tokens: say less", style="red")
            if not sys.stdin.isatty():
                raise typer.Exit(BAD_INPUT)
            continue
        reply = _say(speaker, prompt, derive_seed(seed, "chat", turn))
        history = [*prompt, {"role": "assistant", "content": reply}]


def _lines() -> Iterator[str]:
    """What the person says, line by line, blank ones left out."""
    terminal = sys.stdin.isatty()
    if terminal:
        # Arrow keys, then, edit the line.
        import readline  # noqa: F401
    try:
        while line := (input("\n> ") + "\n" if terminal else sys.stdin.readline()):
            if line.strip():
                yield line
    except (EOFError, KeyboardInterrupt):
        print()


def _say(speaker: ChatModel, prompt: Messages, seed: int) -> str:
    """Print a reply as it comes; returns it. Ctrl-C ends the reply, not the conversation."""
    console = Console(highlight=False, soft_wrap=True)
    pieces: list[str] = []
    try:
        for piece in speaker.reply(prompt, seed):
            pieces.append(piece)
            # Whoever reads through a pipe counts lines.
            text = shown(piece) if console.is_terminal else shown(piece).replace("\n", " ")
            console.print(Text(text, style="cyan"), end="")
    except KeyboardInterrupt:
        console.print("…", end="")
    console.print()
    return "".join(pieces)
