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

from prefect import flow

import xray

CELL, CELLS, MOST = 16, 3, 4
"""Pixels of a cell, cells of a side, and most squares in a picture; a token of the model sees one cell."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
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


def write_model(directory: Path) -> None:
    """A Qwen2.5-VL of 0.4M parameters with random weights, its tokenizer of bytes, and its processor."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    of_bytes = Tokenizer(models.BPE(vocabulary, []))
    of_bytes.pre_tokenizer, of_bytes.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )
    marks = {name: f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")}
    tokenizer.add_tokens(["<|im_start|>", *marks.values()], special_tokens=True)
    numbers = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}}
    tower = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64}
    tower |= {"patch_size": CELL // 2, "spatial_merge_size": 2, "window_size": CELL, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config=text | ends,
        vision_config=tower,
        vision_start_token_id=numbers["vision_start"],
        vision_end_token_id=numbers["vision_end"],
        image_token_id=numbers["image_pad"],
        video_token_id=numbers["video_pad"],
        tie_word_embeddings=True,
        **ends,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    pixels = (CELL * CELLS) ** 2
    Qwen2VLImageProcessorPil(patch_size=CELL // 2, merge_size=2, min_pixels=pixels, max_pixels=pixels).save_pretrained(
        directory
    )


@flow(task_runner=xray.task_runner(), persist_result=False)
def squares_vlm(
    output: str = "runs/squares-vlm", seed: int = 0, steps: int = 300, iterations: int = 30, held_out: int = 256
) -> None:
    """Pictures → SFT on demonstrations that are half right → GRPO → the share of right answers before and after.

    Args:
        steps: of SFT.
        iterations: of GRPO.
        held_out: pictures that the evaluation asks about.
    """
    pictures, model = Path(output).absolute() / "pictures", Path(output).absolute() / "model"
    rows = write_pictures(pictures)
    write_model(model)
    rewards = [xray.reward(verifier={"kind": "regex", "pattern": r"^\s*\d\s*$", "column": "answer"})]
    generator = {"engine": "transformers"}
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
            max_new_tokens=4,
            generator=generator,
        )
        asked = {"num_prompts": held_out, "max_new_tokens": 4, "generator": generator}
        result = xray.evaluate(policy, against=sft, prompts=data, rewards=rewards, **asked)
        xray.register(policy, result)


if __name__ == "__main__":
    squares_vlm()
