"""Small models that read pictures by X-ray and by transformers: the same log-probabilities; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from examples.squares_vlm import write_model
from tests.message_texts import Messages
from xray_runtime.cluster.generator_spec import GeneratorSpec
from xray_runtime.cluster.micro_batches import as_tensors
from xray_runtime.cluster.model_spec import ModelSpec
from xray_runtime.cluster.pictures import with_pictures
from xray_runtime.data.batch import TextBatch
from xray_runtime.data.chat_format import chat_format
from xray_runtime.data.pictures import PLACEHOLDER
from xray_runtime.data.reading.pictures import PictureFolder
from xray_runtime.engines.generators.transformers import TransformersConfig
from xray_runtime.engines.generators.transformers.sampler import TransformersSampler
from xray_runtime.engines.generators.vllm import VLLMConfig
from xray_runtime.engines.layouts import EngineConfig, FrozenConfig
from xray_runtime.engines.sampling import EngineRank, Sampling
from xray_runtime.engines.trainers.deepspeed.config import DeepSpeedConfig
from xray_runtime.engines.trainers.fsdp2.config import FSDP2Config
from xray_runtime.engines.training_config import TrainingConfig
from xray_runtime.methods.base.body import check_written
from xray_runtime.models.causal_lm import copy_small_files, load_model, load_tokenizer, read_pretrained, save_model
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.objectives import ReferenceObjective
from xray_runtime.models.picture_trial import check_pictures
from xray_runtime.models.pictures import PictureReader, TensorCache, copy_processor, features_of
from xray_runtime.models.published_check import check_published
from xray_runtime.models.trial import OtherModelError
from xray_runtime.models.weight_files import tensor_digest, tensors

TOWERS = ("model.visual.", "model.vision_model.", "model.connector.")
REPLY = [70, 71, 72, 73]


def texts(pairs: Any) -> Any:
    prompts, replies = zip(*pairs, strict=True)
    return as_tensors(TextBatch.of(prompts, replies))


def reader(lm: Any, directory: Path) -> PictureReader:
    return PictureReader(lm, directory / "base", [directory / "pictures"], load_tokenizer(directory / "base"))


@pytest.fixture(
    scope="module", params=["qwen2_5_vl", "qwen3_vl", "smolvlm", pytest.param("idefics3", marks=pytest.mark.long)]
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("vlm"), request.param)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of one family."""
    return base(tmp_path_factory.mktemp("vlm"), "qwen2_5_vl")


def base(folder: Path, family: str) -> Path:
    """A base as a stage writes it, and a place for pictures."""
    write_model(folder / "source", family)
    lm, tokenizer, files, left_out = read_pretrained(str(folder / "source"))
    assert not left_out
    save_model(lm, tokenizer, folder / "base", (tokenizer.eos_token_id,), files)
    copy_processor(str(folder / "source"), folder / "base")
    check_written(folder / "base", None)
    return folder


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[dict[str, Any]]]:
    """Prompts with one, two and no pictures."""
    given = directory / "given"
    given.mkdir()
    taken = PictureFolder(directory / "pictures", str(given))
    pictures = []
    for number, size in enumerate([(48, 48), (90, 20), (31, 47)]):
        torch.manual_seed(number)
        pixels = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(given / f"{number}.png")
        pictures.append(taken.store("row", {"image": f"{number}.png"})["images"][0].entry)
    return [
        [{"role": "user", "content": f"{PLACEHOLDER}How many?", "pictures": pictures[:1]}],
        [{"role": "user", "content": f"{PLACEHOLDER}or{PLACEHOLDER}", "pictures": pictures[1:]}],
        [{"role": "user", "content": f"How many? {PLACEHOLDER}"}],
    ]


def plain(directory: Path, messages: list[dict[str, Any]], ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """transformers' own log-probabilities of REPLY after one prompt, from the files of its pictures."""
    lm: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        directory / "base", dtype=dtype, attn_implementation="eager"
    ).eval()
    processor: Any = transformers.AutoImageProcessor.from_pretrained(directory / "base", backend="pil")
    inputs: dict[str, Any] = {}
    if messages[0].get("pictures"):
        files = [next((directory / "pictures").glob(f"{p['sha256']}*")) for p in messages[0]["pictures"]]
        images = [Image.open(file).convert("RGB") for file in files]
        if lm.config.model_type in ("smolvlm", "idefics3"):
            # Its processor writes the tiles of a picture into the text.
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory / "base")
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            given = Idefics3Processor(processor, tokenizer, image_seq_len=1)(images, text, return_tensors="pt")
            assert len(given["input_ids"][0]) == len(ids)
            ids = given.pop("input_ids")[0].tolist()
            inputs = dict(given) | {"attention_mask": None}
        else:
            inputs = dict(processor(images=images, return_tensors="pt"))
            inputs["mm_token_type_ids"] = torch.tensor([[int(n < 0) for n in (*ids, *REPLY)]])
            ids = [lm.config.image_token_id if n < 0 else n for n in ids]
    with torch.no_grad():
        logits = lm(input_ids=torch.tensor([[*ids, *REPLY]]), use_cache=False, **inputs).logits
    found = torch.log_softmax(logits[0, len(ids) - 1 : -1].double(), -1)
    return found.gather(1, torch.tensor(REPLY)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), pytest.param(torch.float64, 2e-6, marks=pytest.mark.long)]
)
def test_scores_are_those_of_transformers(directory: Path, prompts: list[Any], dtype: torch.dtype, most: float) -> None:
    # In float64 too: transformers computes norms and rotary angles of this family in float32.
    ids = chat_format(load_tokenizer(directory / "base")).prompts(prompts)
    lm = load_model(directory / "base").to(dtype).eval()
    module = HeadedLM(lm)
    module.pictures = reader(lm, directory)
    with torch.no_grad():
        scores = ReferenceObjective(1.0).score(module, texts([(prompt, REPLY) for prompt in ids]))
    for messages, prompt, found in zip(prompts, ids, scores.ref_logprobs, strict=True):
        torch.testing.assert_close(found.double(), plain(directory, messages, prompt, dtype), atol=most, rtol=0)


def test_another_picture_is_another_prompt(directory: Path, prompts: list[Any]) -> None:
    one = prompts[0][0]
    other = one | {"pictures": prompts[1][0]["pictures"][:1]}
    first, second = chat_format(load_tokenizer(directory / "base")).prompts([[one], [other]])
    assert first != second
    assert [n for n in first if n >= 0] == [n for n in second if n >= 0]


def test_replies_do_not_depend_on_the_batch(directory: Path, prompts: list[Any]) -> None:
    tokenizer = load_tokenizer(directory / "base")
    ids = chat_format(tokenizer).prompts(prompts)
    sampler = TransformersSampler(directory / "base", EngineRank("cpu"))
    sampler.read_pictures(directory / "base", (directory / "pictures",))
    # The repetition penalty looks at the prompt's own tokens.
    sampling = Sampling(8, 1.0, (tokenizer.eos_token_id,), tokenizer.pad_token_id, repetition_penalty=1.1)
    together = sampler.sample(ids, [1, 2, 3], sampling)
    assert [sampler.sample([prompt], [n], sampling)[0] for n, prompt in enumerate(ids, start=1)] == together

    together = sampler.sample(ids, [1, 2, 3], replace(sampling, repetition_penalty=1.0))
    module = HeadedLM(load_model(directory / "base").eval())
    module.pictures = reader(module.lm, directory)
    pairs = [(prompt, reply.token_ids) for prompt, reply in zip(ids, together, strict=True)]
    with torch.no_grad():
        scores = ReferenceObjective(1.0).score(module, texts(pairs)).ref_logprobs.values
    torch.testing.assert_close(scores, torch.tensor([v for r in together for v in r.logprobs]), atol=5e-6, rtol=0)


def test_the_tower_is_not_trained_and_published_again(directory: Path, prompts: list[Any], tmp_path: Path) -> None:
    module = HeadedLM(load_model(directory / "base"))
    module.pictures = reader(module.lm, directory)
    ids = chat_format(load_tokenizer(directory / "base")).prompts(prompts)
    ReferenceObjective(1.0).score(module, texts([(i, REPLY) for i in ids])).ref_logprobs.values.sum().backward()
    for name, parameter in module.lm.named_parameters():
        assert (parameter.grad is None) == name.startswith(TOWERS), name
    norm = f"{module.parts.norm}.weight"
    with torch.no_grad():
        module.lm.get_parameter(norm).add_(1.0)
    module.lm.save_pretrained(tmp_path / "out")
    copy_small_files(directory / "base", tmp_path / "out")
    before, after = (dict(tensors(each)) for each in (directory / "base", tmp_path / "out"))
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert [*changed] == [name for name in after if norm.endswith(name) or name == "model.norm.weight"]
    written = {name: tensor_digest(after[name]) for name in changed}
    logprobs = transformers_logprobs(tmp_path / "out")
    check_published(tmp_path / "out", directory / "base", written, ("float32", logprobs))


def test_a_base_that_reads_pictures_otherwise_is_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(lm: Any, read: dict[str, torch.Tensor]) -> torch.Tensor:
        return features_of(lm, read).roll(1, 1)

    monkeypatch.setattr("xray_runtime.models.pictures.features_of", shifted)
    tokenizer = load_tokenizer(directory / "base")
    with pytest.raises(OtherModelError, match="states of a picture differ by"):
        check_pictures(load_model(directory / "base"), directory / "base", tmp_path, tokenizer)


def test_little_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xray_runtime.models.pictures.CACHE_BYTES", 100)
    made: list[str] = []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.zeros(10)  # 40 bytes

    cache = TensorCache(make)
    for name in ("a", "b", "a", "c", "a", "b"):
        cache(name)
    assert made == ["a", "b", "c", "b"]  # c took the place of b, which was used before a


def transformers_logprobs(directory: Path) -> list[float]:
    from xray_runtime.models.published_check import tried_ids
    from xray_runtime.models.trial import own_logprobs

    given = tried_ids(directory)
    ids, lengths = torch.tensor([n for row in given for n in row]), torch.tensor([len(row) for row in given])
    return own_logprobs(load_model(directory).eval(), ids, lengths)[0].tolist()


def spec(directory: Path, engine: EngineConfig, **training: Any) -> ModelSpec:
    return ModelSpec(directory / "base", ReferenceObjective(1.0), TrainingConfig(lr=1e-3, engine=engine, **training))


REFUSED: list[tuple[Any, Any]] = [
    ({"tensor_parallel": 2, "num_workhorses": 2}, {}),
    ({"pipeline_parallel": 2, "num_workhorses": 2}, {}),
    ({"sequence_parallel": 2, "num_workhorses": 2}, {}),
    ({"zero_stage": 3, "num_workhorses": 2}, {}),
    ({}, {"lora": LoRAConfig()}),
]


@pytest.mark.parametrize(("layout", "training"), REFUSED)
def test_layouts_that_are_refused(layout: Any, training: Any, one: Path, message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        with_pictures({"policy": spec(one, DeepSpeedConfig(**layout), **training)}, ())


def test_engines_that_are_refused(one: Path, message_texts: Messages) -> None:
    with message_texts.raises(ValueError):
        with_pictures({"policy": spec(one, FSDP2Config())}, ())
    with message_texts.raises(ValueError):
        frozen = FrozenConfig(zero_stage=3, num_workhorses=2)
        with_pictures({"reference": ModelSpec(one / "base", ReferenceObjective(1.0), frozen=frozen)}, ())
    generator, folders = GeneratorSpec(one / "base", 64, VLLMConfig()), (one / "pictures",)
    with message_texts.raises(ValueError):
        with_pictures({"generator": generator}, folders)
    assert with_pictures({"generator": generator}, ()) == {"generator": generator}  # rows of text alone
    known = replace(generator, config=TransformersConfig())
    assert with_pictures({"generator": known}, folders) == {"generator": replace(known, pictures=folders)}
    with message_texts.raises(ValueError):
        HeadedLM(load_model(one / "base"), trainable_layers=1)
