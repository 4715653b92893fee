"""Models on disk: the same bytes for the same inputs, and every unusable one refused in one clear line."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.message_texts import Messages
from xray_runtime.data.tokenizing import CHATML
from xray_runtime.engines.generators.transformers.sampler import sample
from xray_runtime.engines.sampling import Sampling
from xray_runtime.kernel.store import location
from xray_runtime.models import causal_lm, weight_files
from xray_runtime.models.causal_lm import (
    check_publishable,
    copy_model,
    fresh_llama,
    load_model,
    load_tokenizer,
    published,
    read_pretrained,
    save_model,
    skeleton,
    stop_tokens,
    stops_of,
)
from xray_runtime.models.config import FreshBase
from xray_runtime.models.tensor_file import TensorFile

SMALL = FreshBase(hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=16, max_positions=32)
WEIGHTS = "model.safetensors"


@pytest.fixture
def saved(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    save_model(fresh_llama(SMALL, tiny_tokenizer, seed=5), tiny_tokenizer, tmp_path / "saved")
    return tmp_path / "saved"


def edit(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    content = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}
    path.write_text(json.dumps(content))


def test_a_plain_tokenizer_is_the_one_that_transformers_chooses(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = transformers.AutoTokenizer.from_pretrained(saved)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: chosen)
    found = load_tokenizer(saved)
    assert found is not chosen
    assert (type(found), repr(found)) == (type(chosen), repr(chosen))
    assert found.backend_tokenizer.to_str() == chosen.backend_tokenizer.to_str()
    for changed, fields in (("config.json", {"model_type": "mistral"}), ("tokenizer_config.json", {"auto_map": {}})):
        edit(saved / changed, **fields)
        assert load_tokenizer(saved) is chosen
        edit(saved / "config.json", model_type="llama")


def test_the_seed_alone_decides_and_nothing_else_is_drawn(tiny_tokenizer: Any) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = fresh_llama(SMALL, tiny_tokenizer, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    same, other = fresh_llama(SMALL, tiny_tokenizer, seed=5), fresh_llama(SMALL, tiny_tokenizer, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)
    assert first.get_output_embeddings().weight is first.get_input_embeddings().weight


def test_stop_tokens_are_one_list_wherever_they_are_asked_for(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """A template that ends turns with a token of its own, an end-of-sequence token, and what the model recommends."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    end, pad, system = (tokenizer.convert_tokens_to_ids(t) for t in ("<|end|>", "<|pad|>", "<|system|>"))
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|system|>")
    assert stop_tokens(tokenizer, None) == (system, end)
    assert stop_tokens(tokenizer, end) == (system, end)
    assert stop_tokens(tokenizer, [end, pad]) == (system, end, pad)
    save_model(fresh_llama(SMALL, tokenizer, 5), tokenizer, tmp_path / "a", stop_tokens(tokenizer, [pad]))
    # What vLLM and others read, and what a stage that gets the checkpoint does.
    assert json.loads((tmp_path / "a" / "generation_config.json").read_text())["eos_token_id"] == [system, end, pad]
    copy_model(tmp_path / "a", tmp_path / "b")
    assert stops_of(tmp_path / "b", load_tokenizer(tmp_path / "b")) == (system, end, pad)
    (tmp_path / "b" / "generation_config.json").unlink()
    assert stops_of(tmp_path / "b", load_tokenizer(tmp_path / "b")) == (system, end)


def test_a_base_without_a_template_takes_a_named_one_into_its_checkpoint(saved: Path, tmp_path: Path) -> None:
    (saved / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template: set chat_template"):
        read_pretrained(str(saved))
    own = tmp_path / "own.jinja"
    own.write_text("{% for message in messages %}{{ message.content + eos_token }}{% endfor %}")
    before = load_file(saved / WEIGHTS)
    for number, given in enumerate(("chatml", str(own))):
        lm, tokenizer, files = read_pretrained(str(saved), given)[:3]
        save_model(lm, tokenizer, tmp_path / str(number), stop_tokens(tokenizer, None), files)
        template = (tmp_path / str(number) / "chat_template.jinja").read_text()
        assert template == (CHATML if given == "chatml" else own.read_text())
        assert load_tokenizer(tmp_path / str(number)).chat_template == template
        # No new embedding rows.
        assert {n: t.shape for n, t in load_file(tmp_path / str(number) / WEIGHTS).items()} == {
            n: t.shape for n, t in before.items()
        }
    with pytest.raises(ValueError, match=r"^base\.chat_template: .*gone\.jinja' cannot be loaded"):
        read_pretrained(str(saved), str(tmp_path / "gone.jinja"))


@pytest.mark.parametrize("stop", [7, 9])
def test_whichever_stop_token_comes_first_ends_a_reply(stop: int) -> None:
    """Over a `generate` that says what it is told to: the transformers and DeepSpeed engines."""
    sampling = Sampling(max_new_tokens=4, temperature=1.0, stop_token_ids=(7, 9), pad_token_id=0)
    script = [[stop, 0, 0, 0], [5, stop, 0, 0], [5, 6, 5, 6], [5, stop, 16 - stop, 0]]

    def generate(input_ids: torch.Tensor, generation_config: Any, logits_processor: Any, **_: Any) -> torch.Tensor:
        assert generation_config.eos_token_id == [7, 9]
        logits_processor[0].logprobs = [torch.zeros(len(input_ids))] * 4
        said = torch.tensor([script[i] for i in input_ids[:, -1].tolist()])
        return torch.cat([input_ids, said], 1)

    prompts = [[row] for row in range(4)]
    replies = sample(generate, torch.device("cpu"), prompts, [0] * 4, sampling)
    assert [reply.token_ids for reply in replies] == [[stop], [5, stop], [5, 6, 5, 6], [5, stop]]
    assert [reply.ended(sampling) for reply in replies] == [True, True, False, True]


def test_where_a_model_came_from_does_not_show(saved: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(saved, tmp_path / "elsewhere" / "under another name")
    for number, source in enumerate((saved, moved)):
        lm, tokenizer, files = read_pretrained(str(source))[:3]
        save_model(lm, tokenizer, tmp_path / str(number), files=files)
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in "01")
    assert first == second
    assert not any(str(tmp_path).encode() in content for content in first.values())


def test_frozen_weights_are_those_of_the_parent_bit_for_bit(saved: Path, tmp_path: Path) -> None:
    before = load_file(saved / WEIGHTS)
    out = tmp_path / "out"
    # A transposed view: what trained weights look like in memory is no concern of the file.
    moved = torch.arange(32 * 16, dtype=torch.float32).view(32, 16).t()
    copy_model(saved, out)
    with TensorFile(out / WEIGHTS) as file:
        file.write("model.layers.0.mlp.up_proj.weight", moved)
        with pytest.raises(ValueError, match=r"has no place for model\.norm\.weight .*'shape': \[2\]"):
            file.write("model.norm.weight", torch.zeros(2))
    after = load_file(out / WEIGHTS)
    assert torch.equal(after.pop("model.layers.0.mlp.up_proj.weight"), moved)
    del before["model.layers.0.mlp.up_proj.weight"]
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {p.name for p in out.iterdir()} == {p.name for p in saved.iterdir()}
    assert (out / "config.json").read_bytes() == (saved / "config.json").read_bytes()


TINY: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 32, "bos_token_id": None},
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32, "n_shared_experts": 1},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "head_dim": 16},
}
FAMILIES: dict[str, dict[str, Any]] = {
    **{"llama": {}, "gpt_neox": {}, "phi3": {}, "gemma3_text": {}},
    **{"qwen3_moe": EXPERTS, "mixtral": EXPERTS, "deepseek_v3": DEEPSEEK},
}


@pytest.fixture
def tiny(request: pytest.FixtureRequest, tmp_path: Path, tiny_tokenizer: Any) -> Path:
    """A small random model of a family, as the stage `base` writes it."""
    ends = {"pad_token_id": tiny_tokenizer.pad_token_id, "eos_token_id": tiny_tokenizer.eos_token_id}
    fields = TINY | ends | {"vocab_size": len(tiny_tokenizer)} | FAMILIES[request.param]
    config = transformers.AutoConfig.for_model(request.param, **fields)
    save_model(transformers.AutoModelForCausalLM.from_config(config), tiny_tokenizer, tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("tiny", FAMILIES, indirect=True)
def test_publishable_models_are_written_tensor_by_tensor(tiny: Path, tmp_path: Path) -> None:
    lm = skeleton(str(tiny))
    check_publishable(lm)
    trained = {name: parameter.detach() + 0.5 for name, parameter in load_model(tiny).named_parameters()}
    copy_model(tiny, tmp_path / "out")
    with TensorFile(tmp_path / "out" / WEIGHTS) as file:
        for name, tensor in trained.items():
            for saved_name, part in published(lm, name, tensor).items():
                file.write(saved_name, part)
    found = dict(load_model(tmp_path / "out").named_parameters())
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())


@pytest.mark.parametrize(
    ("tiny", "shard"), [*((family, "50KB") for family in FAMILIES), ("llama", "1GB")], indirect=["tiny"]
)
def test_a_base_is_converted_one_tensor_at_a_time_to_the_same_bytes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: str
) -> None:
    """As by transformers, which loads it whole: from one file or several, to one or several."""
    monkeypatch.setattr(causal_lm, "SHARD_BYTES", 100_000)
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 100_000)
    source = tmp_path / "source"
    shutil.copytree(tiny, source)
    (source / WEIGHTS).unlink()
    load_model(tiny).bfloat16().save_pretrained(source, max_shard_size=shard)  # type: ignore[operator]
    edit(source / "generation_config.json", eos_token_id=[3, 4])

    def written(name: str) -> dict[str, bytes]:
        lm, tokenizer, files = read_pretrained(str(source))[:3]
        assert bool(files) is (name == "converted")
        assert lm.generation_config.eos_token_id == [3, 4]
        save_model(lm, tokenizer, tmp_path / name, files=files)
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    with monkeypatch.context() as patched:
        patched.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("whole"))
        converted = written("converted")
    monkeypatch.setattr(causal_lm, "has_plain", lambda *_: False)
    whole = written("whole")
    assert len(converted) > 6
    one, other = (dict(weight_files.tensors(tmp_path / name)) for name in ("converted", "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], tensor) and one[name].dtype == tensor.dtype for name, tensor in other.items())
    # Experts may come in another order, and so in other files.
    different = {name for name in converted.keys() | whole.keys() if converted.get(name) != whole.get(name)}
    assert not different or ("experts" in str(one.keys()) and all("model" in name for name in different))


BASE = """
import re, sys
from pathlib import Path
from xray_runtime.models.causal_lm import read_pretrained, save_model

def memory(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

read_pretrained(sys.argv[1])  # libraries
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
lm, tokenizer, files = read_pretrained(sys.argv[2])[:3]
save_model(lm, tokenizer, Path(sys.argv[3]), files=files)
print(memory("VmHWM") - before)
"""


@pytest.mark.long
def test_a_base_takes_the_memory_of_a_tensor(saved: Path, tmp_path: Path, tiny_tokenizer: Any) -> None:
    """50M parameters, 100 MB in bfloat16 and 200 MB in float32; a tensor has 4 MB in float32."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_layers": 12, "num_heads": 8, "num_kv_heads": 8}
    lm: Any = fresh_llama(SMALL.model_copy(update=sizes), tiny_tokenizer, 1).bfloat16()
    save_model(lm, tiny_tokenizer, tmp_path / "large")
    assert (tmp_path / "large" / WEIGHTS).stat().st_size > 90e6
    command = [sys.executable, "-c", BASE, str(saved), str(tmp_path / "large"), str(tmp_path / "out")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.split()[-1])
    assert (tmp_path / "out" / WEIGHTS).stat().st_size > 190e6
    assert grown < 40e6


@pytest.mark.parametrize("tiny", ["qwen3_moe"], indirect=True)
def test_unpublishable_models_are_refused_before_weights_are_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "published", lambda lm, name, tensor: {name: tensor})
    (tiny / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"^base\.model: .* \(a 'qwen3_moe' model .*gate_up_proj cannot be saved by"):
        read_pretrained(str(tiny))


def test_a_tokenizer_without_padding_pads_with_the_end(saved: Path) -> None:
    edit(saved / "tokenizer_config.json", pad_token=None)
    _, tokenizer, _ = read_pretrained(str(saved))[:3]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


@pytest.mark.parametrize("model", ["./nowhere", "~/nowhere", "a/b/c", "./nowhere.gguf"])
def test_a_path_that_is_not_there(model: str, message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        read_pretrained(model)


def empty(saved: Path) -> None:
    for path in saved.iterdir():
        path.unlink()


def lose_the_norm(saved: Path) -> None:
    weights = load_file(saved / WEIGHTS)
    del weights["model.norm.weight"]
    save_file(weights, saved / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage",
    [
        empty,
        lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-9]),
        lose_the_norm,
        lambda d: (d / "config.json").write_text("{"),
        lambda d: edit(d / "config.json", model_type="t5", architectures=None),
        lambda d: edit(d / "config.json", hidden_size=64),
        lambda d: (d / "chat_template.jinja").unlink(),
        lambda d: edit(d / "tokenizer_config.json", eos_token=None),
    ],
    ids=["empty", "cut short", "a tensor less", "no JSON", "encoder", "other shapes", "no template", "no end token"],
)
def test_a_model_that_cannot_serve_is_refused_in_one_line(
    saved: Path, damage: Callable[[Path], None], message_texts: Messages
) -> None:
    damage(saved)
    with message_texts.raises(ValueError):
        read_pretrained(str(saved))


@pytest.mark.parametrize("content", [b"no GGUF in here, only text", b"GGUF\x03\x00\x00\x00" + b"\xff" * 40])
def test_a_file_that_is_no_gguf_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"base.model: .*model\.gguf' cannot be loaded") as caught:
        read_pretrained(str(path))
    assert "\n" not in str(caught.value)


def test_a_family_built_otherwise_works_whole(tmp_path: Path, tiny_tokenizer: Any) -> None:
    import transformers

    from xray_runtime.models.heads import HeadedLM

    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=1, vocab_size=300))
    save_model(made, tiny_tokenizer, tmp_path)
    lm: Any = load_model(tmp_path)
    lm.eval()
    ids = torch.tensor([[5, 7, 11]])
    module = HeadedLM(lm, scalar_head=True)
    torch.testing.assert_close(module.lm.lm_head(module.hidden(ids[0], torch.tensor([3]))), lm(ids).logits[0])
    with pytest.raises(ValueError, match=r"base\.trainable_layers: 1 is not allowed.*GPT2LMHeadModel"):
        HeadedLM(lm, trainable_layers=1)


class Intruder:
    """Unpickled, it makes a directory."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.place),)


def test_weights_that_are_a_pickle_are_not_opened(saved: Path, tmp_path: Path) -> None:
    (saved / WEIGHTS).unlink()
    (saved / "pytorch_model.bin").write_bytes(pickle.dumps(Intruder(tmp_path / "hurt")))
    with pytest.raises(ValueError, match=r"cannot be loaded .*safetensors"):
        read_pretrained(str(saved))
    with pytest.raises(OSError, match="safetensors"):
        load_model(saved)
    assert not (tmp_path / "hurt").exists()


def test_code_that_lies_beside_a_model_does_not_run(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anybody asked whether it may."""
    (saved / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'hurt')!r})\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    classes = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}
    edit(saved / "config.json", model_type="own", auto_map=classes)
    edit(saved / "tokenizer_config.json", tokenizer_class="Own", auto_map=classes)
    for load in (read_pretrained, skeleton):
        with pytest.raises(ValueError, match=r"custom code|trust_remote_code"):
            load(str(saved))
    assert not (tmp_path / "hurt").exists()


def test_a_packaged_model_names_the_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(location.PACKAGED_MODELS, "tiny-1m", ("package_of_nobody", "tiny.gguf"))
    with pytest.raises(ValueError, match="'tiny-1m' needs the package package-of-nobody"):
        read_pretrained("tiny-1m")
