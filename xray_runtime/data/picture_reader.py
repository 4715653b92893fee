"""A picture's file as pixels, the same wherever it is read."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from xray_runtime.data.pictures import ENDINGS

MAX_PIXELS = 2**26


def read_picture(file: Path | BytesIO) -> tuple[Any, str]:
    """(pillow's image in RGB: the first frame, turned as EXIF says, without transparency; its format).

    Raises whatever pillow does, and ValueError: it has too many pixels or bits.
    """
    from PIL import Image, ImageOps

    # No other format: some of pillow's readers start programs.
    with Image.open(file, formats=list(ENDINGS)) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"it has {width} × {height} pixels, more than {MAX_PIXELS:,}")
        if image.mode.startswith(("I", "F")):
            # pillow would cut off what is brighter than 255.
            raise ValueError(f"it has more than 8 bits a channel, mode {image.mode}")
        return ImageOps.exif_transpose(image).convert("RGB"), str(image.format)
