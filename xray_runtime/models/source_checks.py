"""The contents of a pretrained model's files, compared with what transformers makes of them, before any computation.

transformers drops tensors that a class does not have, fills missing ones with random numbers, reads other classes'
checkpoints, and applies adapters that lie beside a model, all with a warning at most. Here each is refused in one line,
unless transformers itself says that the model does not need the tensors: these are counted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils.hub import cached_file

from xray_runtime.data.tokenizer import Tokenizer
from xray_runtime.models.family import HFConfig, family_of
from xray_runtime.models.quantized import why_quantized

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
FLOATS = ("F64", "F32", "F16", "BF16")
COMPUTED_BUFFERS = ("inv_freq", "original_inv_freq", "position_ids", "masked_bias", "bias")
"""Last parts of names under which old checkpoints hold what a model computes; `bias` is GPT-2's causal mask."""
OF_LAYERS = re.compile(r"^mtp\.|(^|\.)(h|layers)\.\d+\.")
"""Parts of the language model that predict further tokens, or whose layer shares another's."""
SHOWN = 3
"""Number of names in a message."""


class ForeignModelError(ValueError):
    """X-ray would train or publish this as another model; the text goes on after "it"."""


MERGED = "merge it first, with PeftModel.from_pretrained(…).merge_and_unload().save_pretrained(DIRECTORY)"


def check_no_adapter(name: str, remedy: str = MERGED) -> None:
    """Raises ForeignModelError if a directory or a repository of a hub holds an adapter, alone or beside a model."""
    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if Path(name).is_dir():
        held = [file for file in ADAPTER_FILES if (Path(name) / file).is_file()]
    else:
        held = [file for file in ADAPTER_FILES[:1] if cached_file(name, file, **options) is not None]
    if held:
        raise ForeignModelError(f"has {held[0]}, an adapter: {remedy}")


def check_config(config: HFConfig) -> None:
    """Raises ForeignModelError if a Hugging Face config is of more than one causal language model with plain
    weights."""
    kind, sections = config.model_type, sorted(getattr(type(config), "sub_configs", {}))
    media = [name for name in sections if name.startswith(("vision", "audio")) and getattr(config, name, None)]
    if family_of(kind).pictures is None and (media or config.get_text_config(decoder=True) is not config):
        others = ", ".join(name for name in media or sections if getattr(config, name, None) is not None)
        raise ForeignModelError(
            f"is a {kind!r} model of several parts ({others or 'an encoder and a decoder'}), of which X-ray would "
            "train and publish the language model alone: save that by itself first, as a causal language model"
        )
    reason = why_quantized(vars(config))
    if reason is not None:
        raise ForeignModelError(reason)


def check_class(config: HFConfig, lm: Any) -> None:
    """Raises ForeignModelError if the files were saved by another class than that of `lm`, which transformers chose."""
    ours, saved = type(lm).__name__, list(getattr(config, "architectures", None) or [])
    own = str((getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM") or ours).rpartition(".")[2]
    if own != ours:
        raise ForeignModelError(f"is a {own} with code of its own (auto_map), which transformers reads as a {ours}")
    if not saved or ours in saved:
        return
    remedy = "save it as one first, or correct architectures in its config.json"
    if saved[0].endswith("ForSequenceClassification"):
        remedy = "a reward model is given to reward_base"
    raise ForeignModelError(f"is a {saved[0]}, which transformers reads as a {ours}: {remedy}")


def left_out(lm: Any, files: Mapping[str, Path], unexpected: Iterable[str], saved: Collection[str]) -> list[str]:
    """The tensors of `files` that `lm` does not need; none of `saved`, the names that it is saved with.

    Args:
        unexpected: those that transformers found in the files and not in the model.

    Raises:
        ForeignModelError: there are others, or weights are stored as something else than floating-point numbers.
    """
    ignored = [*(lm._keys_to_ignore_on_load_unexpected or ()), *(rf"{name}$" for name in COMPUTED_BUFFERS[:3])]
    pattern = re.compile("|".join(f"({each})" for each in ignored))
    unused = {name for name in files if name not in saved and pattern.search(name)}
    harmless = {
        name for name in unused if name.rpartition(".")[2] in COMPUTED_BUFFERS or OF_LAYERS.search(name) is not None
    }
    strange = sorted((set(unexpected) | unused) - harmless - set(saved))
    if strange:
        raise ForeignModelError(
            f"has {len(strange)} tensors that a {type(lm).__name__} does not have ({_some(strange)}): they would be "
            "lost; if they are another part's, or scales of quantized weights, extract or convert the model first"
        )
    _check_types({name: file for name, file in files.items() if name not in harmless})
    return sorted(harmless)


def _check_types(files: Mapping[str, Path]) -> None:
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dict
                dtype = opened.get_slice(name).get_dtype()
                if name in files and dtype not in FLOATS and not name.endswith(COMPUTED_BUFFERS):
                    raise ForeignModelError(f"is quantized ({name} is stored as {dtype}): convert it to bfloat16 first")


def check_vocabulary(lm: Any, tokenizer: Tokenizer, stops: Iterable[int] = ()) -> list[str]:
    """The added tokens of `tokenizer` that have no row in the embedding and that nothing writes: a text that spells
    them is encoded as text (`data.control_tokens`).

    Raises:
        ForeignModelError: another token has no row.
    """
    layers = lm.get_input_embeddings(), lm.get_output_embeddings()
    rows = min(layer.weight.shape[0] for layer in layers if layer is not None)
    missing = {token: number for token, number in tokenizer.get_vocab().items() if number >= rows}
    added, template = tokenizer.added_tokens_decoder, str(tokenizer.chat_template or "")
    ends = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    used = {number for number in (*ends, *stops) if number is not None and number >= rows}
    needed = [t for t, number in missing.items() if number not in added or number in used or t in template]
    if needed:
        raise ForeignModelError(
            f"has an embedding of {rows:,} rows, and its tokenizer {len(needed):,} tokens above ({_some(needed)}): add "
            "rows with resize_token_embeddings and save it, or remove the tokens"
        )
    return sorted(missing)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:SHOWN]) + (", …" if len(listed) > SHOWN else "")
