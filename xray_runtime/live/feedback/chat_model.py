"""A checkpoint that answers with transformers on one device: one reply as a stream, or many at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xray_runtime.data.pairs import Messages
from xray_runtime.data.tokenizing import decode_replies, decode_reply, encode_prompts
from xray_runtime.engines.sampling import EngineRank, Sampling
from xray_runtime.kernel.config.validation import ConfigError
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.history.graph import CheckpointGraph, Node

TORN = "\ufffd"
"""Decoding gives this for a character whose tokens are not complete yet."""


def trained_context(graph: CheckpointGraph, node: Node) -> int | None:
    """Messages of a prompt in the data a model was trained on; None without such data."""
    value = _data_config(graph, node).get("context_messages")
    return value if isinstance(value, int) else None


def trained_columns(graph: CheckpointGraph, node: Node) -> list[str]:
    """Columns beside the prompts in the data a model was trained on (`data.columns`)."""
    value = _data_config(graph, node).get("columns")
    return [str(name) for name in value] if isinstance(value, list) else []


def _data_config(graph: CheckpointGraph, node: Node) -> dict[str, Any]:
    dataset = graph.nodes.get(node.manifest.dataset or "")
    return dataset.manifest.config if dataset is not None else {}


def last_messages(history: Messages, context: int | None) -> Messages:
    """The last `context` messages, starting with a user's, as in prompts of conversations (`data.reading.sources`)."""
    recent = history[-context:] if context is not None else history
    return recent[recent[0]["role"] == "assistant" :]


@contextlib.contextmanager
def _loading(directory: Path) -> Iterator[None]:
    """Raises ConfigError where something cannot be loaded: readers of damaged files raise errors of many kinds."""
    try:
        yield
    except Exception as error:
        reason = first_line(error)
        raise ConfigError(f"REF: {str(directory)!r} cannot be loaded ({reason})") from error


class PromptLimits:
    """The tokenizer of a checkpoint, and its limits on prompts."""

    def __init__(self, directory: Path, max_new_tokens: int, temperature: float) -> None:
        import transformers

        from xray_runtime.models.causal_lm import load_tokenizer, max_positions, stops_of

        transformers.utils.logging.disable_progress_bar()
        with _loading(directory):
            self.tokenizer = load_tokenizer(directory)
            stops = stops_of(directory, self.tokenizer)
            self.max_positions = max_positions(directory)
        self.sampling = Sampling(max_new_tokens, temperature, stops, self.tokenizer.pad_token_id)
        if self.max_positions is not None and max_new_tokens >= self.max_positions:
            raise ConfigError(
                f"--max-new-tokens: {max_new_tokens} is not allowed: must be less than the model's "
                f"{self.max_positions} positions"
            )

    def excess(self, prompt: Messages) -> int:
        """Tokens by which a prompt with the longest reply exceeds the model; 0 or less: it fits."""
        [ids] = encode_prompts(self.tokenizer, [prompt])
        return self.excess_of(len(ids))

    def excess_of(self, num_tokens: int) -> int:
        """`excess` of a prompt of `num_tokens`."""
        return 0 if self.max_positions is None else num_tokens + self.sampling.max_new_tokens - self.max_positions

    def cut(self, prompt: Messages) -> Messages:
        """`prompt` without its first messages if it does not fit; the last one always stays."""
        while len(prompt) > 1 and self.excess(prompt) > 0:
            prompt = last_messages(prompt, len(prompt) - 1)
        return prompt


def fitting(prompts: list[Messages], models: list[PromptLimits], max_prompt_tokens: int | None) -> list[Messages]:
    """The prompts that fit every model and have at most `max_prompt_tokens` for each."""
    for model in models:
        sizes = [len(ids) for ids in encode_prompts(model.tokenizer, prompts)]
        prompts = [
            prompt
            for prompt, size in zip(prompts, sizes, strict=True)
            if model.excess_of(size) <= 0 and (max_prompt_tokens is None or size <= max_prompt_tokens)
        ]
    return prompts


class ChatModel:
    """A model in memory that chats with one person."""

    def __init__(self, directory: Path, limits: PromptLimits, device: str) -> None:
        from xray_runtime.models.causal_lm import load_model
        from xray_runtime.models.merging import opened_model

        with _loading(directory), opened_model(directory) as model:
            self._lm: Any = load_model(model).to(device).eval()
        self._limits = limits

    def reply(self, prompt: Sequence[int], seed: int, tokens: list[int]) -> Iterator[str]:
        """The reply to a prompt that fits, in pieces as they come; appends its tokens to `tokens`."""
        from xray_runtime.engines.generators.transformers.sampler import stream

        sent, text = "", ""
        for token in stream(self._lm, list(prompt), seed, self._limits.sampling):
            tokens.append(token)
            text = decode_reply(self._limits.tokenizer, tokens)
            if not text.endswith(TORN):
                yield text[len(sent) :]
                sent = text
        yield text[len(sent) :]


class PromptSampler:
    """A model in memory that answers many prompts, each with its own seed."""

    def __init__(self, directory: Path, limits: PromptLimits, device: str) -> None:
        from xray_runtime.engines.generators.transformers.sampler import TransformersSampler
        from xray_runtime.models.merging import opened_model

        with _loading(directory), opened_model(directory) as model:
            self._sampler = TransformersSampler(model, EngineRank(device))
        self._limits = limits

    def answers(self, prompts: Sequence[Messages], seeds: Sequence[int]) -> list[str]:
        """One reply for each prompt, in order, independent of the other prompts."""
        tokenizer = self._limits.tokenizer
        replies = self._sampler.sample(encode_prompts(tokenizer, prompts), list(seeds), self._limits.sampling)
        return decode_replies(tokenizer, [reply.token_ids for reply in replies])
