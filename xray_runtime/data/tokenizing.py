"""Text to tokens and back: chat templates, a tokenizer trained on the corpus, the encoding of prompts and replies.

A control token spelled in a text is encoded as text (`chat_format`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.pairs import Messages, reply_message
from xray_runtime.data.pictures import runs, shown_picture
from xray_runtime.data.reasoning import split_reasoning, with_reasoning
from xray_runtime.data.tokenizer import Tokenizer

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
TOOL, TOOLS = "<|tool|>", "<|tools|>"

CALLS = (
    "{% for call in message['tool_calls'] or [] %}{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n{\"name\": ' + call.function.name | tojson + ', \"arguments\": ' + "
    "call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
)
"""The calls of a message in the form of Hermes and Qwen, which environments and `xray serve` read."""
REASONING = (
    "{% if message['role'] == 'assistant' and message['reasoning_content'] %}"
    "{{ '<think>\n' + message['reasoning_content'] + '\n</think>\n\n' }}{% endif %}"
)
"""The reasoning of a message as DeepSeek and Qwen write it, in every turn."""
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|tools|>' + tools | tojson + '<|end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    + REASONING
    + "{{ message['content'] }}"
    + CALLS
    + "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CHATML = (
    "{% if bos_token and bos_token != eos_token %}{{ bos_token }}{% endif %}"
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + eos_token + '\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    + REASONING
    + "{{ message['content'] }}"
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


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[Messages]) -> list[list[int]]:
    """Token ids of each prompt under the chat template, up to the start of the assistant's reply."""
    return chat_format(tokenizer).prompts(prompts)


def encode_replies_to(
    tokenizer: Tokenizer, replies: Sequence[tuple[Messages, dict[str, Any]]], *, sampled: bool = False
) -> list[list[int]]:
    """Token ids of each assistant's message after its prompt, with the end of its turn. Raises ValueError: the template
    changes one that was not `sampled`."""
    return chat_format(tokenizer).replies(replies, sampled=sampled)


def encode_conversations(tokenizer: Tokenizer, prompts: Sequence[Messages], replies: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt with its reply as the assistant's last turn, under the chat template."""
    conversations = [[*prompt, reply_message(reply)] for prompt, reply in zip(prompts, replies, strict=True)]
    return chat_format(tokenizer).wholes(conversations)


def decode_replies(tokenizer: Tokenizer, ids: Sequence[Sequence[int]]) -> list[str]:
    """The text of each reply, without special tokens, with its reasoning as `data.reasoning` reads it."""
    return chat_format(tokenizer).texts(ids)


def decode_reply(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """`decode_replies` of one reply."""
    return decode_replies(tokenizer, [ids])[0]


def decode_prompts(tokenizer: Tokenizer, ids: Sequence[Sequence[int]]) -> list[str]:
    """The text of each prompt, or of a part of one, without special tokens; pictures as `pictures.SHOWN`."""
    if not ids:
        return []  # transformers would return one empty text
    parts = [list(runs(row)) for row in ids]
    found = iter(
        tokenizer.batch_decode(
            [part for row in parts for digest, part in row if digest is None], skip_special_tokens=True
        )
    )
    return ["".join(next(found) if d is None else shown_picture(d) for d, _ in row) for row in parts]


def turns(tokenizer: Tokenizer, ids: np.ndarray, sampled: np.ndarray) -> list[tuple[bool, str]]:
    """A multi-turn episode, tokens [T] and which of them the policy sampled [T], as (whether it did, text)."""
    chosen = sampled.astype(bool)
    places = np.flatnonzero(chosen[1:] != chosen[:-1]) + 1
    are_own = chosen[[0, *places.tolist()]].tolist()
    parts = [part.tolist() for part in np.split(ids.astype(np.int64), places)]
    texts = {True: decode_replies(tokenizer, parts), False: decode_prompts(tokenizer, parts)}
    return [(is_own, texts[is_own][number]) for number, is_own in enumerate(are_own)]


def sampled_turns(ids: Sequence[int], sampled: np.ndarray) -> list[list[int]]:
    """The tokens of each of the policy's turns in an episode."""
    runs = groupby(zip(ids, sampled.tolist(), strict=True), key=itemgetter(1))
    return [[number for number, _ in run] for is_own, run in runs if is_own]


def own_text(tokenizer: Tokenizer, ids: np.ndarray, sampled: np.ndarray) -> str:
    """The policy's turns of an episode as one reply: the reasoning of all turns, and then their answers, one per
    line."""
    texts = [split_reasoning(text) for is_own, text in turns(tokenizer, ids, sampled) if is_own]
    reasoning = [thought for thought, _ in texts if thought is not None]
    return with_reasoning("\n".join(reasoning) if reasoning else None, "\n".join(answer for _, answer in texts))


def transcript(tokenizer: Tokenizer, ids: np.ndarray, sampled: np.ndarray) -> str:
    """The whole episode for display, with observations in brackets."""
    return " ".join(text if is_reply else f"[{text}]" for is_reply, text in turns(tokenizer, ids, sampled))
