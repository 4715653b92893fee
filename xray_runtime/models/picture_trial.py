"""One drawn picture through a model as its authors wrote it and as X-ray computes it, before anything is trained."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from xray_runtime.data.pictures import picture_ids
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.pictures import PictureReader, picture_tokens
from xray_runtime.models.trial import STATES, OtherModelError, tried_rows

SIZE = 96, 64
"""Width and height of the picture, in pixels."""


@torch.no_grad()
def check_pictures(lm: Any, checkpoint: Path, scratch: Path) -> None:
    """Compare last hidden states of a prompt with a picture, if the model in `checkpoint` reads pictures.

    Args:
        lm: in float32 with its weights.
        scratch: an empty directory.

    Raises:
        OtherModelError: they differ, or one fails.
    """
    tokens = picture_tokens(checkpoint)
    if tokens is None:
        return
    from PIL import Image

    Image.linear_gradient("L").resize(SIZE).convert("RGB").save(scratch / "drawn.png")
    digest = sha256((scratch / "drawn.png").read_bytes()).hexdigest()
    (scratch / "drawn.png").rename(scratch / f"{digest}.png")
    text = tried_rows(tokens.before)[0][:4].tolist()
    try:
        row = torch.tensor([*text, tokens.before, *picture_ids(digest, tokens.count(*SIZE)), tokens.after, *text])
        module, reader = HeadedLM(lm), PictureReader(lm, checkpoint, [scratch])
        module.pictures, digests = reader, reader.in_rows([row.tolist()])
        ours = module.eval().hidden(row, torch.tensor([len(row)]))
        inputs = {"pixel_values": reader.pixels(digests), "image_grid_thw": reader.grids(digests)}
        ids, is_picture = reader.as_tokens(row[None]), (row[None] < 0).int()
        output = lm(input_ids=ids, mm_token_type_ids=is_picture, use_cache=False, output_hidden_states=True, **inputs)
    except Exception as error:
        raise OtherModelError(f"fails in a forward pass of a picture ({type(error).__name__}: {error})") from error
    theirs = output.hidden_states[-1][0]
    off = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    if not off <= STATES:
        raise OtherModelError(
            f"is computed otherwise by X-ray than by transformers: states of a picture differ by {off:.1%}"
        )
