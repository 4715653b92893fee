"""vLLM's OpenAI-compatible server as an ASGI application in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.pairs import Messages
from xray_runtime.data.reasoning import CLOSE, KEY, OPEN, split_reasoning
from xray_runtime.engines.generators.vllm.loading import load_vllm
from xray_runtime.engines.generators.vllm.sampler import PREFILL_TOKENS, allowed_rank
from xray_runtime.kernel.config.section import RuntimeConfig
from xray_runtime.models.causal_lm import load_tokenizer


def arguments(
    directory: Path, names: list[str], sha256: str, runtime: RuntimeConfig, device: str, tensor_parallel: int
) -> list[str]:
    """The options with which `vllm serve` would serve the model in `directory` as we do.

    Args:
        names: names of the model in requests; answers carry the first.
        sha256: `system_fingerprint` of every answer.
        runtime: its share of the device is that of a lifecycle's generator.
        device: "cpu" or "cuda".
        tensor_parallel: number of devices that the model is split over.
    """
    options = [str(directory), "--served-model-name", *names, "--load-format", "safetensors"]
    # Chat templates get the content of messages as plain text.
    options += ["--chat-template-content-format", "string"]
    options += ["--fingerprint-mode", "custom", "--fingerprint-value", sha256]
    options += ["--tensor-parallel-size", str(tensor_parallel)]
    if device == "cuda":
        return [*options, "--dtype", "bfloat16", "--gpu-memory-utilization", str(runtime.gpu_memory_fraction)]
    config = json.loads((directory / "config.json").read_bytes())
    length = min(config.get("max_position_embeddings", PREFILL_TOKENS), PREFILL_TOKENS)
    # As in the generator, a seeded request with a split prompt fails on CPU.
    options += ["--no-enable-chunked-prefill", "--no-enable-prefix-caching", "--enforce-eager", "--dtype", "float32"]
    options += ["--kv-cache-memory-bytes", str(round(runtime.generator_memory_gib * 2**30))]
    return [*options, "--max-num-batched-tokens", str(PREFILL_TOKENS), "--max-model-len", str(length)]


def adapter_arguments(adapters: Sequence[tuple[str, Path, int, Sequence[str]]]) -> list[str]:
    """Further options for adapters beside the model: (name in requests, directory, rank, adapted layers) of each."""
    if not adapters:
        return []
    modules = [json.dumps({"name": name, "path": str(path)}) for name, path, _, _ in adapters]
    ranks, layers = [rank for _, _, rank, _ in adapters], sorted({each for *_, of in adapters for each in of})
    # In a batch with adapters, vLLM's CPU kernels give rows without one (number -1) that of the last slot, which is
    # therefore left empty.
    slots = str(len(adapters) + 1)
    options = ["--enable-lora", "--max-loras", slots, "--max-lora-rank", str(allowed_rank(max(ranks)))]
    return [*options, "--lora-target-modules", *layers, "--lora-modules", *modules]


NO_CALLS = (
    "tools are not allowed: the chat template of this model does not show them, or writes calls in another form than "
    '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
)
READ_TYPES = ("function", "custom", "namespace")
"""Types of tools that `/v1/responses` shows to the model. vLLM ignores others, which a server would have to run."""


def call_parser(directory: Path) -> str:
    """Register the parser for calls of the model in `directory` with vLLM; returns its name."""
    from vllm.tool_parsers import ToolParser, ToolParserManager
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    class Calls(Hermes2ProToolParser):
        """Refuses requests with tools that vLLM would ignore."""

        def adjust_request(self, request: Any) -> Any:
            for tool in request.tools or ():
                if tool.type not in READ_TYPES:
                    raise ValueError(f"tools: the type {tool.type!r} is not allowed: must be {', '.join(READ_TYPES)}")
            return super().adjust_request(request)

    if chat_format(load_tokenizer(directory)).writes_hermes_calls:
        ToolParserManager.register_module("calls", module=Calls)
        return "calls"

    class NoCalls(ToolParser):
        def adjust_request(self, request: Any) -> Any:
            if request.tools:
                raise ValueError(NO_CALLS)
            return request

    ToolParserManager.register_module("none", module=NoCalls)
    return "none"


def reasoning_parser(directory: Path) -> str:
    """Register the parser for reasoning of the model in `directory` with vLLM; returns its name."""
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.reasoning import ReasoningParser, ReasoningParserManager

    form = chat_format(load_tokenizer(directory))

    class Reasoning(ReasoningParser):
        """Reads replies as rewards do (`data.reasoning`); a stream holds back what may yet be part of a tag."""

        _is_over = False

        def adjust_request(self, request: Any) -> Any:
            if form.marks_are_special:
                request.skip_special_tokens = False
            return request

        def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
            return False  # asked of prompts, behind which reasoning may begin

        def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
            return self._is_over

        def extract_content_ids(self, input_ids: list[int]) -> list[int]:
            return input_ids

        def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
            reasoning, answer = split_reasoning(form.with_marks(model_output))
            return reasoning, answer or None

        def extract_reasoning_streaming(
            self, previous_text: str, current_text: str, delta_text: str, *ids: Sequence[int]
        ) -> DeltaMessage | None:
            before, _ = begun_reply(form.with_marks(previous_text)) if previous_text else (("", ""), False)
            now, self._is_over = begun_reply(form.with_marks(current_text))
            reasoning, answer = (b.removeprefix(a) for a, b in zip(before, now, strict=True))
            return DeltaMessage(reasoning=reasoning or None, content=answer or None) if reasoning or answer else None

    ReasoningParserManager.register_module("think", module=Reasoning)
    return "think"


def begun_reply(text: str) -> tuple[tuple[str, str], bool]:
    """((reasoning, answer) so far of a reply that begins with `text`, whether the reasoning is over)."""
    if OPEN.startswith(text.strip()):
        return ("", ""), False
    reasoning, answer = split_reasoning(text)
    if reasoning is None:
        return ("", answer), True
    if CLOSE in text:
        return (reasoning, answer), True
    tails = [tail[:n] for tail in (CLOSE, f"\n{CLOSE}") for n in range(len(tail))]
    held = max(len(tail) for tail in tails if reasoning.endswith(tail))
    return (reasoning[: len(reasoning) - held], ""), False


def naming_reasoning_content(parser: Any) -> Any:
    """`parser` whose messages have the reasoning as `reasoning_content` too: vLLM writes `reasoning`, which it was
    renamed to, and most clients read the older name."""

    def parse_delta(self: Any, *args: Any, **keywords: Any) -> Any:
        delta = parser.parse_delta(self, *args, **keywords)
        if delta is not None and delta.reasoning is not None:
            delta.reasoning_content = delta.reasoning
        return delta

    return type("Named", (parser,), {"parse_delta": parse_delta})


def guarded(tokenizer: Any) -> Callable[..., list[int]]:
    """`tokenizer.apply_chat_template` that no message can forge a turn in; returns tokens as in training.

    It raises ValueError (status 400) if the template refuses or changes a message, or an option is not supported.
    """
    form = chat_format(tokenizer)

    def apply_chat_template(
        conversation: Messages,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        tokenize: bool = True,
        return_dict: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        if chat_template not in (None, tokenizer.get_chat_template(tools=tools)):
            raise ValueError("chat_template is not allowed: conversations are written as the model was trained")
        if continue_final_message or not add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt=false are not allowed")
        messages = [_as_written(message) for message in conversation]
        for message in messages:
            if not isinstance(message["content"], str):
                raise ValueError(f"content must be a text, not {type(message['content']).__name__}")
        if tools:
            messages[0] = messages[0] | {"tools": [_as_given(tool) for tool in tools]}
        [ids] = form.prompts([messages], **variables)
        return ids

    return apply_chat_template


def _as_written(message: dict[str, Any]) -> dict[str, Any]:
    """A message in X-ray's form; vLLM names reasoning `reasoning`."""
    found = {key: value for key, value in message.items() if key not in ("reasoning", KEY)}
    reasoning = message.get("reasoning") or message.get(KEY)
    return found | {"content": message.get("content") or ""} | ({KEY: reasoning} if reasoning else {})


def _as_given(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool without the nulls that vLLM adds for missing fields."""
    return tool | {"function": {name: value for name, value in tool["function"].items() if value is not None}}


def _finished(message: Any, *, parser: Any) -> Any:
    if message.reasoning is not None:
        message.reasoning_content = message.reasoning
    return message


class VLLMServer:
    """One engine, in a child process that ends with this one, and its application."""

    def __init__(self, options: list[str], runtime: RuntimeConfig, device: str) -> None:
        self._directory, self._options = options[0], options
        # Ray sets this to the actor's CPUs, and the engine inherits it.
        os.environ["OMP_NUM_THREADS"] = str(runtime.threads)
        load_vllm(device)

    async def start(self) -> Any:
        """Load the model; returns the FastAPI application."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.fingerprint import set_default_fingerprint_mode
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", *self._options])
        # The engine's own process does not know this parser, nor need it.
        reasoning = reasoning_parser(Path(self._directory))
        args.enable_auto_tool_choice, args.tool_call_parser = True, call_parser(Path(self._directory))
        validate_parsed_serve_args(args)
        set_default_fingerprint_mode(args.fingerprint_mode, args.fingerprint_value)
        context = UsageContext.OPENAI_API_SERVER
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=context)
        self._engine = AsyncLLM.from_vllm_config(vllm_config=config, usage_context=context)
        # The tokenizer's own method would turn text in messages into control tokens.
        tokenizer: Any = self._engine.renderer.get_tokenizer()
        tokenizer.apply_chat_template = guarded(load_tokenizer(self._directory))
        tasks = await self._engine.get_supported_tasks()
        app = build_app(args, tasks, self._engine.model_config)
        args.structured_outputs_config.reasoning_parser = reasoning
        await init_app_state(self._engine, app.state, args, tasks)
        chat = app.state.openai_serving_chat
        chat.parser_cls, chat._finalize_response_message = naming_reasoning_content(chat.parser_cls), _finished
        # vLLM's handler of a dead engine needs this attribute; here `check` detects it.
        app.state.server = SimpleNamespace()
        return app

    async def check(self) -> None:
        """Raises if the engine has died."""
        await self._engine.check_health()

    def stop(self) -> None:
        self._engine.shutdown()
