"""Causal language models on disk and in memory: a fresh small Llama, anything Hugging Face loads, GGUF files.

Weights on disk are safetensors in Hugging Face form, so every checkpoint also loads without X-ray.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import accelerate
import torch
import transformers
from torch import nn
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion
from transformers.utils.hub import cached_file

from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.tokenizing import named_template
from xray_runtime.kernel.errors import first_line
from xray_runtime.kernel.hidden_libraries import hidden
from xray_runtime.kernel.store.location import NO_CODE, locate
from xray_runtime.kernel.store.manifest import WEIGHTS_INDEX
from xray_runtime.models.adapter_files import with_adapter
from xray_runtime.models.attention import attention_of, auto_class
from xray_runtime.models.context import max_positions as max_positions
from xray_runtime.models.family import HFConfig, family_of
from xray_runtime.models.fresh import fresh_llama as fresh_llama
from xray_runtime.models.pictures import PROCESSOR, picture_tokens
from xray_runtime.models.source_checks import (
    ForeignModelError,
    check_class,
    check_config,
    check_no_adapter,
    check_vocabulary,
    left_out,
)
from xray_runtime.models.tensor_file import WEIGHTS_FILE
from xray_runtime.models.weight_files import SHARD_BYTES, copy_weights, has_plain, weight_files, write_float32

if TYPE_CHECKING:
    from xray_runtime.data.tokenizer import Tokenizer

WEIGHTS = (WEIGHTS_FILE, WEIGHTS_INDEX)
SMALL_FILES = ("config.json", "generation_config.json", PROCESSOR, "chat_template.jinja", "merges.txt", "vocab.json")


class _Weights(NamedTuple):
    """A model in float32, or its skeleton."""

    lm: Any
    files: dict[str, Path]
    """A skeleton's tensors: name → its file."""
    left_out: list[str]
    """Tensors in its files that it does not need."""


class Pretrained(NamedTuple):
    """A pretrained model in float32."""

    lm: Any
    tokenizer: Tokenizer
    files: dict[str, Path]
    """See `_Weights`."""
    left_out: list[str]
    """See `_Weights`."""


def read_pretrained(model: str, chat_template: str | None = None, adapter: str | None = None) -> Pretrained:
    """Read a model in float32 from a hub name, a directory, a .gguf file or a packaged name.

    A model whose files hold the tensors that it is saved with is only a skeleton, and `save_model` converts them one at
    a time. Others, whose tensors transformers renames or puts together, are loaded whole.

    Args:
        chat_template: a name or a file, in place of the tokenizer's own.
        adapter: a directory with a LoRA adapter in peft's form, which is merged into the model.

    Raises:
        ValueError: `model` cannot be found, or not be loaded without running code of its own, or its files hold another
            model than X-ray would train (`source_checks`).
    """
    name, gguf = locate(model)
    options: dict[str, Any] = NO_CODE | ({"gguf_file": gguf} if gguf else {})
    try:
        if gguf:
            loaded, missing = load_weights(transformers.AutoModelForCausalLM, name, **options)
            found = _Weights(loaded, {}, [])
        else:
            check_no_adapter(name, "name the model that it was trained on, and this directory as base.adapter")
            found, missing = _read_files(model, name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
    except ForeignModelError as error:
        raise ValueError(f"base.model: {model!r} is not allowed: it {error}") from error
    except Exception as error:
        raise unloadable("base.model", model, error) from error
    if missing is not None:
        raise ValueError(f"base.model: {model!r} has no weights for {missing}")
    lm, files = _without_quantization(found.lm) if gguf else found.lm, found.files
    if adapter is not None:
        if files:
            lm, files = load_weights(transformers.AutoModelForCausalLM, name, **options)[0], {}
        lm = with_adapter(lm, Path(adapter), "base.adapter", Path(name))
    if chat_template is not None:
        try:
            tokenizer.chat_template = named_template(chat_template)
        except (OSError, UnicodeDecodeError) as error:
            raise unloadable("base.chat_template", chat_template, error) from error
    complete_tokenizer(tokenizer, "base.model", model)
    try:
        no_row = check_vocabulary(lm, tokenizer)
    except ForeignModelError as error:
        raise ValueError(f"base.model: {model!r} is not allowed: it {error}") from error
    return Pretrained(lm, tokenizer, files, found.left_out + no_row)


def _read_files(model: str, name: str) -> tuple[_Weights, str | None]:
    """(a model, a tensor that its files lack)."""
    lm: Any = skeleton(model)  # before weights are read
    check_class(lm.config, lm)
    check_publishable(lm)
    found, saved = _files_of(name), saved_shapes(lm)
    tied = lm.get_expanded_tied_weights_keys(all_submodels=True)
    # Where all that it needs is there under the same names, the rest is not needed.
    more = found.keys() - saved.keys() - tied.keys() if saved.keys() <= found.keys() else set()
    unused = left_out(lm, found, more, saved)
    files = {tensor: file for tensor, file in found.items() if tensor not in unused}
    if has_plain(files, saved):
        with contextlib.suppress(OSError):  # it has none
            lm.generation_config = transformers.GenerationConfig.from_pretrained(name, **NO_CODE)
        return _Weights(lm, files, unused), None
    lm, report = load_reported(transformers.AutoModelForCausalLM, name)
    unused = left_out(lm, found, report["unexpected_keys"], saved)
    _untie(lm)
    return _Weights(lm, {}, unused), min(report["missing_keys"], default=None)


def _untie(lm: Any) -> None:
    """Have the config say that the output layer is not tied where transformers read one of its own from the files."""
    if any(lm.get_parameter(a) is not lm.get_parameter(b) for a, b in lm.get_expanded_tied_weights_keys().items()):
        lm.config.tie_word_embeddings = False


def _files_of(name: str) -> dict[str, Path]:
    """Tensor → its safetensors file, in a directory or a repository of a hub."""
    if Path(name).is_dir():
        return weight_files(Path(name))
    found = [cached_file(name, each, _raise_exceptions_for_missing_entries=False) for each in WEIGHTS]
    folder = next((Path(file).parent for file in found if file is not None), None)
    files = {} if folder is None else weight_files(folder)
    for file in {file.name for file in files.values()}:
        cached_file(name, file)
    return files


def saved_shapes(lm: Any) -> dict[str, torch.Size]:
    """Names and shapes of the tensors that `save_pretrained` writes, in its order; tied ones have one name."""
    held = lm.state_dict()
    once = dict(lm.named_parameters()) | {name: buffer for name, buffer in lm.named_buffers() if name in held}
    ordered = {name: once[name] for name in sorted(once, key=dot_natural_key)}
    return {name: tensor.shape for name, tensor in revert_weight_conversion(lm, ordered).items()}


def complete_tokenizer(tokenizer: Tokenizer, field: str, model: str) -> None:
    """Have the end token pad where nothing else does. Raises ValueError where a conversation cannot be written."""
    if tokenizer.chat_template is None:
        raise ValueError(f"{field}: the tokenizer of {model!r} has no chat template: set chat_template")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{field}: the tokenizer of {model!r} has no end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def unloadable(field: str, model: str, error: Exception) -> ValueError:
    """One line for the errors of readers of damaged files, each in its own form."""
    reason = first_line(error)
    return ValueError(f"{field}: {model!r} cannot be loaded ({reason})")


def _without_quantization(lm: Any) -> nn.Module:
    # A dequantized GGUF model still carries its quantization config, and save_pretrained refuses such a model.
    config = lm.config.__class__.from_dict({k: v for k, v in lm.config.to_dict().items() if k != "quantization_config"})
    config.dtype = torch.float32
    with torch.device("meta"):
        clean: nn.Module = lm.__class__(config)
    clean.load_state_dict(lm.state_dict(), assign=True)
    clean.tie_weights()  # type: ignore[operator]
    return clean


def save_model(
    lm: Any, tokenizer: Tokenizer, directory: Path, stops: Sequence[int] = (), files: Mapping[str, Path] | None = None
) -> None:
    """Write `lm` and `tokenizer` in Hugging Face form, with nothing in it that differs between equal runs.

    Args:
        stops: tokens that end a reply (`stop_tokens`), in generation_config.json for whoever serves the checkpoint.
        files: of a skeleton (`read_pretrained`).
    """
    lm.config._name_or_path = ""
    ends = list(stops) if len(stops) > 1 else tokenizer.eos_token_id
    lm.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    if files:
        lm.config.dtype, lm.config.architectures = "float32", [type(lm).__name__]
        lm.config.save_pretrained(directory)
        lm.generation_config.save_pretrained(directory)
        write_float32(files, saved_shapes(lm), directory)
    else:
        # Only to look whether the model is one of DeepSpeed's, which would be imported by now.
        with hidden("deepspeed"):
            lm.save_pretrained(directory, safe_serialization=True, max_shard_size=SHARD_BYTES)
    tokenizer.name_or_path = ""
    tokenizer.save_pretrained(directory)


def copy_model(like: Path, directory: Path, number: int = 0, copiers: int = 1) -> None:
    """Copy a checkpoint in Hugging Face form, for its weights to be overwritten by those that were trained; this is
    copier `number` of the `copiers` that divide the files."""
    directory.mkdir(parents=True, exist_ok=True)
    copy_weights(like, directory, number, copiers)
    if not number:
        copy_small_files(like, directory)


def copy_small_files(source: Path, directory: Path) -> None:
    """Copy config and tokenizer files (everything of Hugging Face form but the weights)."""
    for file in sorted(source.iterdir()):
        if file.name in SMALL_FILES or file.name.startswith(("tokenizer", "special_tokens", "added_tokens")):
            (directory / file.name).write_bytes(file.read_bytes())


def skeleton(model: str) -> nn.Module:
    """The causal LM of a hub name, a directory, a .gguf file or a packaged name, in float32 with its weights on the
    meta device. Buffers that are computed (rotary frequencies) have their values."""
    name, gguf = locate(model)
    config = transformers.AutoConfig.from_pretrained(name, **NO_CODE, **({"gguf_file": gguf} if gguf else {}))
    if not gguf:
        check_config(config)
    lm: Any = without_weights(config)
    # Without weights a tied weight becomes two.
    lm.tie_weights()
    loaded: nn.Module = lm.eval()
    return loaded


def without_weights(config: HFConfig) -> Any:
    """The causal LM of a Hugging Face config in float32, its weights on the meta device and not tied yet."""
    with accelerate.init_empty_weights(include_buffers=False), _untouched():
        return auto_class(config).from_config(
            config, dtype=torch.float32, attn_implementation=attention_of(config), **NO_CODE
        )


def published(lm: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A parameter of `lm` as `save_pretrained` writes it: in memory transformers keeps the experts of a layer in one
    tensor, which on disk, and for generators, are one each."""
    return dict(revert_weight_conversion(lm, {name: tensor}))


def check_publishable(lm: Any) -> None:
    """Check, from names and shapes alone, that tensors which are trained one at a time can be saved and read so.

    Raises:
        ValueError: transformers saves a tensor of `lm` under another name or shape where it stands by itself.
    """
    whole = {name: tensor.shape for name, tensor in revert_weight_conversion(lm, dict(lm.state_dict())).items()}
    for name, parameter in lm.named_parameters():
        for saved, tensor in published(lm, name, parameter.detach()).items():
            if whole.get(saved) != tensor.shape:
                family = lm.config.model_type
                raise ValueError(f"a {family!r} model is not supported: {name} cannot be saved by itself (as {saved})")


@contextlib.contextmanager
def _untouched() -> Iterator[None]:
    """Deterministic algorithms fill what `torch.empty` returns: here, memory that a meta tensor replaces at once."""
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before


def load_model(directory: str | os.PathLike[str]) -> nn.Module:
    """The causal LM of a checkpoint directory, in float32. Raises ValueError if some of its weights are missing."""
    model: nn.Module
    model, missing = load_weights(transformers.AutoModelForCausalLM, str(directory), local_files_only=True)
    if missing is not None:
        raise ValueError(f"{directory}: has no weights for {missing}")
    return model


def load_weights(family: Any, name: str, **options: Any) -> tuple[Any, str | None]:
    """(the model of a hub name or a directory in float32, a tensor that its files lack: transformers would go on with
    random numbers in its place). `family`: one of transformers' Auto classes."""
    model, report = load_reported(family, name, **options)
    return model, min(report["missing_keys"], default=None)


def load_reported(family: Any, name: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """(the model as by `load_weights`, transformers' report about the tensors of its files)."""
    gguf = {"gguf_file": options["gguf_file"]} if "gguf_file" in options else {}
    config = transformers.AutoConfig.from_pretrained(name, **NO_CODE, **gguf)
    auto = auto_class(config) if family is transformers.AutoModelForCausalLM else family
    loaded: tuple[Any, dict[str, Any]] = auto.from_pretrained(
        name,
        dtype=torch.float32,
        # A config may name an attention that is fetched from a hub, so it is not left to it.
        attn_implementation=attention_of(config),
        output_loading_info=True,
        use_safetensors=None if "gguf_file" in options else True,  # never a .bin, which is a pickle
        **(options | NO_CODE),
    )
    return loaded


def stop_tokens(tokenizer: Tokenizer, recommended: int | Sequence[int] | None) -> tuple[int, ...]:
    """The tokens that end a reply, wherever one is sampled or read: first the one by which the chat template ends a
    turn, then the tokenizer's end-of-sequence token and those of the model's generation config. Raises ValueError if
    the template ends a turn without a special token."""
    others = [recommended] if isinstance(recommended, int) else recommended or []
    return tuple(dict.fromkeys([chat_format(tokenizer).end_of_turn, tokenizer.eos_token_id, *others]))


def stops_of(directory: str | os.PathLike[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """`stop_tokens` of a checkpoint directory."""
    path = Path(directory) / "generation_config.json"
    recommended = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    return stop_tokens(tokenizer, recommended)


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a checkpoint directory."""
    paths = [Path(directory) / name for name in ("tokenizer_config.json", "config.json")]
    tokenizer, model = (json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {} for path in paths)
    is_plain = tokenizer.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in tokenizer
    # Choosing a class imports 3,000 modules (pandas, scipy, torch's compiler): 5 CPU seconds of every stage.
    if is_plain and ("model_type" not in model or family_of(model["model_type"]).plain_tokenizer):
        kind: Any = transformers.PreTrainedTokenizerFast
    else:
        kind = transformers.AutoTokenizer
    loaded: Tokenizer = kind.from_pretrained(str(directory), local_files_only=True, **NO_CODE)
    loaded.pictures = picture_tokens(Path(directory), loaded)
    return loaded
