"""One drawn picture through a model as its authors wrote it and as X-ray computes it, before anything is trained."""

from __future__ import annotations

from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from xray_runtime.data.pictures import PictureTokens
from xray_runtime.data.tokenizer import Tokenizer
from xray_runtime.models.heads import HeadedLM
from xray_runtime.models.pictures import PictureReader
from xray_runtime.models.trial import STATES, OtherModelError, tried_rows

SIZE = 96, 64
"""Width and height of the picture, in pixels."""


@torch.no_grad()
def check_pictures(lm: Any, checkpoint: Path, scratch: Path, tokenizer: Tokenizer) -> None:
    """Compare last hidden states of a prompt with a picture, if the model in `checkpoint` reads pictures.

    Args:
        lm: in float32 with its weights.
        scratch: an empty directory.
        tokenizer: `causal_lm.load_tokenizer` of `checkpoint`.

    Raises:
        OtherModelError: they differ, or one fails.
    """
    written = PictureTokens.of(tokenizer)
    if written is None:
        return
    from PIL import Image

    Image.linear_gradient("L").resize(SIZE).convert("RGB").save(scratch / "drawn.png")
    digest = sha256((scratch / "drawn.png").read_bytes()).hexdigest()
    (scratch / "drawn.png").rename(scratch / f"{digest}.png")
    text = tried_rows(min(written.written))[0][:4].tolist()
    try:
        picture = {"sha256": digest, "width": SIZE[0], "height": SIZE[1]}
        row = torch.tensor(written.expand([*text, *written.written, *text], [picture])[0])
        module, reader = HeadedLM(lm), PictureReader(lm, checkpoint, [scratch], tokenizer)
        module.pictures = reader
        ours = module.eval().hidden(row, torch.tensor([len(row)]))
        ids, is_feature = reader.as_tokens(row[None], [digest])
        kinds = (
            {"mm_token_type_ids": is_feature.int()} if "mm_token_type_ids" in signature(lm.forward).parameters else {}
        )
        output = lm(input_ids=ids, use_cache=False, output_hidden_states=True, **reader.read(digest), **kinds)
    except Exception as error:
        raise OtherModelError(f"fails in a forward pass of a picture ({type(error).__name__}: {error})") from error
    theirs = output.hidden_states[-1][0]
    off = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    if not off <= STATES:
        raise OtherModelError(
            f"is computed otherwise by X-ray than by transformers: states of a picture differ by {off:.1%}"
        )
