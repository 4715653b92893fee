"""A checkpoint that answers: one reply streamed to whoever reads along, or many at once. transformers, one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xray_runtime.config.validation import ConfigError
from xray_runtime.data.pairs import Messages
from xray_runtime.data.tokenizing import decode_replies, encode_prompts
from xray_runtime.engines.generation.sampling import EngineRank, Sampling
from xray_runtime.lineage.graph import Graph, Node

TORN = "\ufffd"
"""What decoding gives for a character of which not all tokens are there yet."""


def trained_context(graph: Graph, node: Node) -> int | None:
    """How many messages a prompt had in the data a model was trained on; None where it was trained on none of ours."""
    value = _data_config(graph, node).get("context_messages")
    return value if isinstance(value, int) else None


def trained_columns(graph: Graph, node: Node) -> list[str]:
    """What the data a model was trained on carries beside its prompts (`data.columns`)."""
    value = _data_config(graph, node).get("columns")
    return [str(name) for name in value] if isinstance(value, list) else []


def _data_config(graph: Graph, node: Node) -> dict[str, Any]:
    dataset = graph.nodes.get(node.manifest.dataset or "")
    return dataset.manifest.config if dataset is not None else {}


def last_messages(history: Messages, context: int | None) -> Messages:
    """The last `context` messages from a user's on, as prompts are cut from conversations (`data.sources`)."""
    recent = history[-context:] if context is not None else history
    return recent[recent[0]["role"] == "assistant" :]


@contextlib.contextmanager
def _loading(directory: Path) -> Iterator[None]:
    """Raises ConfigError where something cannot be loaded: readers of damaged files fail each in a way of its own."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"REF: {str(directory)!r} cannot be loaded ({reason})") from error


class PromptLimits:
    """The tokenizer of a checkpoint, and how long a prompt it takes."""

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
        """Tokens by which a prompt and the longest reply are too long together; 0 or less: they fit."""
        [ids] = encode_prompts(self.tokenizer, [prompt])
        return self.excess_of(len(ids))

    def excess_of(self, num_tokens: int) -> int:
        """`excess` of a prompt of so many tokens."""
        return 0 if self.max_positions is None else num_tokens + self.sampling.max_new_tokens - self.max_positions

    def cut(self, prompt: Messages) -> Messages:
        """`prompt` without as many of its first messages as do not fit; the last one always stays."""
        while len(prompt) > 1 and self.excess(prompt) > 0:
            prompt = last_messages(prompt, len(prompt) - 1)
        return prompt


def fitting(prompts: list[Messages], models: list[PromptLimits], max_prompt_tokens: int | None) -> list[Messages]:
    """Those of `prompts` that fit every model, and are not longer for it than `max_prompt_tokens`."""
    most = []
    for model in models:
        limits = [max_prompt_tokens, model.max_positions and model.max_positions - model.sampling.max_new_tokens]
        most.append(min((limit for limit in limits if limit is not None), default=None))
    sizes = [[len(ids) for ids in encode_prompts(model.tokenizer, prompts)] for model in models]
    return [
        prompt
        for prompt, *own in zip(prompts, *sizes, strict=True)
        if all(limit is None or size <= limit for size, limit in zip(own, most, strict=True))
    ]


class ChatModel:
    """A model in memory that talks to one person."""

    def __init__(self, directory: Path, limits: PromptLimits, device: str) -> None:
        from xray_runtime.models.causal_lm import load_model

        with _loading(directory):
            self._lm: Any = load_model(directory).to(device).eval()
        self._limits = limits

    def reply(self, prompt: Sequence[int], seed: int, tokens: list[int]) -> Iterator[str]:
        """The reply to a prompt that fits, in pieces as they come; its tokens are put into `tokens`, an empty list."""
        from xray_runtime.engines.generation.transformers_generate import stream

        said, text = "", ""
        for token in stream(self._lm, list(prompt), seed, self._limits.sampling):
            tokens.append(token)
            text = self._limits.tokenizer.decode(tokens, skip_special_tokens=True)
            if not text.endswith(TORN):
                yield text[len(said) :]
                said = text
        yield text[len(said) :]


class BatchSampler:
    """A model in memory that answers many prompts, each with a seed of its own."""

    def __init__(self, directory: Path, limits: PromptLimits, device: str) -> None:
        from xray_runtime.engines.generation.transformers_generate import TransformersSampler

        with _loading(directory):
            self._sampler = TransformersSampler(directory, EngineRank(device))
        self._limits = limits

    def answers(self, prompts: Sequence[Messages], seeds: Sequence[int]) -> list[str]:
        """One reply a prompt, in order. Neither depends on the other prompts."""
        tokenizer = self._limits.tokenizer
        replies = self._sampler.sample(encode_prompts(tokenizer, prompts), list(seeds), self._limits.sampling)
        return decode_replies(tokenizer, [reply.token_ids for reply in replies])
