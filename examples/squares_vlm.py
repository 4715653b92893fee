"""How many squares? A model that reads pictures learns to count, by SFT and then by GRPO with a verifier.

Pictures are drawn here, and the model begins as a small Qwen2.5-VL with random weights: a run needs no download. Its
tower, which turns a picture into nine tokens, is never trained; the language model learns to read what it says. The
demonstrations are right half of the time, and the verifier, which compares each reply with the row's column `answer`,
does the rest.

    xray run examples.squares_vlm:squares_vlm
    xray rollouts policy --output runs/squares-vlm        # prompts name their pictures by digest

Change next: `model=` to a Qwen2.5-VL from a hub, and `rows` to rows of your own (docs/pictures.md).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from prefect import flow

import xray

CELL, CELLS, MOST = 16, 3, 4
"""Pixels of a cell, cells of a side, and most squares in a picture; a token of the model sees one cell."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_OF_QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, CELLS + 1) for column in range(1, CELLS + 1)]
_OF_IDEFICS = ["<image>", "<fake_token_around_image>", "<global-img>", *_TILES]
MARKS = {
    "qwen2_5_vl": _OF_QWEN,
    "qwen3_vl": _OF_QWEN,
    "smolvlm": _OF_IDEFICS,
    "idefics3": _OF_IDEFICS,
}
"""Family → the tokens with which it writes pictures."""
COLORS = ["#d33", "#283", "#23c", "#a3a", "#c70"]


def write_pictures(folder: Path, count: int = 1600, right: float = 0.5) -> Path:
    """Pictures with 1 to `MOST` squares, and rows that ask how many, answered rightly with probability `right`."""
    from PIL import Image, ImageDraw

    draw, lines = random.Random(0), []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image = Image.new("RGB", (CELL * CELLS, CELL * CELLS), "white")
        pen, squares = ImageDraw.Draw(image), draw.randint(1, MOST)
        for cell in draw.sample(range(CELLS**2), squares):
            size = draw.randint(9, 13)
            left, top = (CELL * place + draw.randint(0, CELL - size - 1) for place in divmod(cell, CELLS))
            pen.rectangle([left, top, left + size, top + size], fill=draw.choice(COLORS))
        name = f"{number:05}.png"
        image.save(folder / name)
        said = squares if draw.random() < right else draw.randint(1, MOST)
        row = {"image": name, "prompt": "<image>How many squares?", "completion": str(said), "answer": str(squares)}
        lines.append(json.dumps(row) + "\n")
    rows = folder.with_suffix(".jsonl")
    rows.write_text("".join(lines))
    return rows


def write_model(directory: Path, family: str = "qwen2_5_vl") -> None:
    """A model of 0.4M parameters with random weights, its tokenizer of bytes, and its processor.

    Args:
        family: `qwen2_5_vl`, `qwen3_vl`, `smolvlm` or `idefics3`.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    of_bytes = Tokenizer(models.BPE(vocabulary, []))
    of_bytes.pre_tokenizer, of_bytes.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )
    tokenizer.add_tokens(["<|im_start|>", *MARKS[family]], special_tokens=True)
    ids = [tokenizer.convert_tokens_to_ids(mark) for mark in MARKS[family]]
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 192, "head_dim": 32}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config, processor = (_qwen if family.startswith("qwen") else _idefics3)(family, text | ends, ids, ends)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    processor.save_pretrained(directory)


def _qwen(family: str, text: dict[str, Any], ids: list[int], ends: dict[str, Any]) -> tuple[Any, Any]:
    """(config, processor): one token a cell."""
    import transformers
    from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}}
    tower: dict[str, Any] = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
    tower |= {"out_hidden_size": 64, "patch_size": CELL // 2, "spatial_merge_size": 2}
    if family == "qwen3_vl":
        tower |= {"num_position_embeddings": (2 * CELLS) ** 2, "deepstack_visual_indexes": [0]}
    else:
        tower |= {"window_size": CELL, "fullatt_block_indexes": [1]}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    config = transformers.AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        **dict(zip(names, ids, strict=True)),
        **ends,
    )
    pixels = (CELL * CELLS) ** 2
    size = {"shortest_edge": pixels, "longest_edge": pixels}
    return config, Qwen2VLImageProcessorPil(patch_size=CELL // 2, merge_size=2, size=size)


def _idefics3(family: str, text: dict[str, Any], ids: list[int], ends: dict[str, Any]) -> tuple[Any, Any]:
    """(config, processor): a tile, and so one token between two marks, a cell."""
    import transformers
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(
        family,
        text_config=text | {"model_type": "llama", "tie_word_embeddings": True},
        vision_config=tower | {"image_size": CELL, "patch_size": CELL // 2},
        scale_factor=2,
        image_token_id=ids[0],
        tie_word_embeddings=True,
        **ends,
    )
    sizes = {"size": {"longest_edge": CELL * CELLS}, "max_image_size": {"longest_edge": CELL}}
    return config, SmolVLMImageProcessorPil(**sizes)


@flow(task_runner=xray.task_runner(), persist_result=False)
def squares_vlm(
    output: str = "runs/squares-vlm",
    seed: int = 0,
    family: str = "qwen2_5_vl",
    steps: int = 300,
    iterations: int = 30,
    held_out: int = 256,
) -> None:
    """Pictures → SFT on demonstrations that are half right → GRPO → the share of right answers before and after.

    Args:
        family: of the model (`write_model`).
        steps: of SFT.
        iterations: of GRPO.
        held_out: pictures that the evaluation asks about.
    """
    pictures, model = Path(output).absolute() / "pictures", Path(output).absolute() / "model"
    rows = write_pictures(pictures)
    write_model(model, family)
    rewards = [xray.reward(verifier={"kind": "regex", "pattern": r"^\s*\d\s*$", "column": "answer"})]
    sampled: dict[str, Any] = {"max_new_tokens": 4, "generator": {"engine": "transformers"}}
    with xray.workspace(output, project="squares-vlm", seed=seed):
        data = xray.prepare(source=str(rows), pictures=str(pictures), columns=["answer"], heldout_fraction=0.2)
        base = xray.base(model=str(model))
        sft = xray.sft(base, data=data, steps=steps, lr=2e-3, batch_size=32, max_response_tokens=4)
        policy = xray.ppo(
            sft,
            prompts=data,
            rewards=rewards,
            method="grpo",
            iterations=iterations,
            lr=5e-4,
            reward_scaling="none",
            prompts_per_iteration=32,
            minibatch_size=64,
            **sampled,
        )
        result = xray.evaluate(policy, against=sft, prompts=data, rewards=rewards, num_prompts=held_out, **sampled)
        xray.register(policy, result)


if __name__ == "__main__":
    squares_vlm()
