"""Text to tokens and back: chat templates, a tokenizer trained on the corpus, the encoding of prompts and replies.

A control token spelled in a text is encoded as text (`chat_format`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.pairs import Messages

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
TOOL, TOOLS = "<|tool|>", "<|tools|>"

CALLS = (
    "{% for call in message['tool_calls'] or [] %}{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n{\"name\": ' + call.function.name | tojson + ', \"arguments\": ' + "
    "call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
)
"""The calls of a message in the form of Hermes and Qwen, which environments and `xray serve` read."""
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|tools|>' + tools | tojson + '<|end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    + CALLS
    + "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CHATML = (
    "{% if bos_token and bos_token != eos_token %}{{ bos_token }}{% endif %}"
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + eos_token + '\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    + CALLS
    + "{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML's headers, with every turn closed by the model's end-of-sequence token, so that the vocabulary stays the same.
A message can contain a header's text, but not the token before it."""


def named_template(value: str) -> str:
    """The template `chatml`, or the one in a file. Raises OSError or UnicodeDecodeError if that cannot be read."""
    return CHATML if value == "chatml" else Path(value).read_text(encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer (Sennrich et al. 2016) with a chat template; the same for the same texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, USER, ASSISTANT, SYSTEM, TOOL, TOOLS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM, TOOL, TOOLS],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode_prompts(tokenizer: Any, prompts: Sequence[Messages]) -> list[list[int]]:
    """Token ids of each prompt under the chat template, up to the start of the assistant's reply."""
    return chat_format(tokenizer).prompts(prompts)


def encode_replies(tokenizer: Any, replies: Sequence[str]) -> list[list[int]]:
    """Token ids of each reply after a prompt, with the end of its turn."""
    return chat_format(tokenizer).replies(replies) if replies else []


def encode_replies_to(tokenizer: Any, replies: Sequence[tuple[Messages, str, Any]]) -> list[list[int]]:
    """`encode_replies` for (prompt, text, tool calls or None)."""
    texts = iter(encode_replies(tokenizer, [text for _, text, calls in replies if not calls]))
    found = []
    for prompt, text, calls in replies:
        reply = {"role": "assistant", "content": text, "tool_calls": calls}
        # A template's form of calls may depend on the prompt's tools.
        found.append(chat_format(tokenizer).calling_reply(prompt, reply) if calls else next(texts))
    return found


def encode_conversations(tokenizer: Any, prompts: Sequence[Messages], replies: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt with its reply as the assistant's last turn, under the chat template."""
    conversations = [
        ([*prompt, {"role": "assistant", "content": reply}], ()) for prompt, reply in zip(prompts, replies, strict=True)
    ]
    return [turns.ids for turns in chat_format(tokenizer).turns(conversations)]


def decode_replies(tokenizer: Any, ids: Sequence[Sequence[int]]) -> list[str]:
    """The text of each reply, without special tokens."""
    if not ids:
        return []  # transformers would return one empty text
    texts: list[str] = tokenizer.batch_decode([[int(i) for i in row] for row in ids], skip_special_tokens=True)
    return texts


def turns(tokenizer: Any, ids: np.ndarray, sampled: np.ndarray) -> list[tuple[bool, str]]:
    """A multi-turn episode, tokens [T] and which of them the policy sampled [T], as (whether it did, text)."""
    chosen = sampled.astype(bool)
    places = np.flatnonzero(chosen[1:] != chosen[:-1]) + 1
    parts = decode_replies(tokenizer, [part.tolist() for part in np.split(ids.astype(np.int64), places)])
    return list(zip(chosen[[0, *places.tolist()]].tolist(), parts, strict=True))


def own_text(tokenizer: Any, ids: np.ndarray, sampled: np.ndarray) -> str:
    """The policy's turns of an episode, one per line."""
    return "\n".join(text for is_reply, text in turns(tokenizer, ids, sampled) if is_reply)


def transcript(tokenizer: Any, ids: np.ndarray, sampled: np.ndarray) -> str:
    """The whole episode for display, with observations in brackets."""
    return " ".join(text if is_reply else f"[{text}]" for is_reply, text in turns(tokenizer, ids, sampled))
