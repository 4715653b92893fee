"""Idefics3 and SmolVLM: a Llama that also reads pictures, each cut into tiles of one size and once more as a whole.

In a prompt a picture is its tiles, each behind the token of its row and column, and the whole behind a token of its
own. Between a tower, which sees a tile at a time, and the language model stands a projection: both stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xray_runtime.models.family import Family, Parts, Pictures, token_id

AROUND, WHOLE, TILE = "<fake_token_around_image>", "<global-img>", "<row_{}_col_{}>"
"""Tokens of transformers' processors."""


def _layout(processor: Any, tokenizer: Any, config: Mapping[str, Any], width: int, height: int) -> list[int]:
    """As transformers' `Idefics3Processor` writes a picture."""
    vision = config["vision_config"]
    side = vision["image_size"] // vision["patch_size"]
    features = [config["image_token_id"]] * (side**2 // config["scale_factor"] ** 2)
    _, rows, columns = processor.get_number_of_image_patches(height, width)
    around, ids = token_id(tokenizer, AROUND), list[int]()
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            ids += [around, token_id(tokenizer, TILE.format(row, column)), *features]
        ids += tokenizer.encode("\n" if row < rows else "\n\n", add_special_tokens=False)
    return [*ids, around, token_id(tokenizer, WHOLE), *features][1:]


_TEXT = "model.text_model"
FAMILY = Family(
    model_types=("idefics3", "smolvlm"),
    parts=Parts(_TEXT, f"{_TEXT}.embed_tokens", f"{_TEXT}.layers", f"{_TEXT}.norm"),
    pictures=Pictures(
        towers=("model.vision_model", "model.connector"),
        written=("image_token_id",),
        layout=_layout,
        # transformers takes the features of a tile, or of any other number of tokens, at a time.
        encoded=lambda features: {"pooler_output": features[0][:, None]},
        has_grid=False,
        around=AROUND,
    ),
)
