"""Pictures as a model reads them: the numbers that its processor makes of their files, and the features of its tower.

transformers' processor reads them with pillow, whatever else is installed, so that the same file has the same numbers.
Each picture goes through the tower by itself: its features do not depend on what else is in a batch. The tower is never
trained, so they are computed once and kept.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xray_runtime.data.pictures import ENDINGS, PictureFiles, PictureTokens, pictures_in
from xray_runtime.models.family import family_of

PROCESSOR = "preprocessor_config.json"
CACHE_BYTES = 2**28
"""Bytes of pictures' numbers, and of features, that are kept."""


class TensorCache:
    """Tensors by name, which `make` makes; the ones that were used last stay, up to `CACHE_BYTES` bytes."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        self._make, self._held, self._num_bytes = make, OrderedDict[str, Tensor](), 0
        # Micro-batches may be computed by several threads.
        self._lock = threading.RLock()

    def __call__(self, name: str) -> Tensor:
        with self._lock:
            tensor = self._held.pop(name, None)
            if tensor is None:
                tensor = self._make(name)
                self._num_bytes += tensor.nbytes
            self._held[name] = tensor
            while self._num_bytes > CACHE_BYTES and len(self._held) > 1:
                self._num_bytes -= self._held.popitem(last=False)[1].nbytes
            return tensor


class PictureSize(NamedTuple):
    """The size of a picture for the model."""

    grid: Tensor
    """Time, rows and columns of its patches [1, 3]."""
    num_tokens: int


def load_processor(name: str) -> Any:
    """transformers' image processor of a directory or a hub name, by pillow."""
    # The package would import the processors of videos, too, which want torchvision.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(name, backend="pil", trust_remote_code=False)


def copy_processor(model: str, directory: Path) -> None:
    """Write the image processor of a model, a hub name or a directory, into its checkpoint, if it reads pictures."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if family_of(config["model_type"]).pictures is not None:
        load_processor(model).save_pretrained(directory)


def picture_tokens(directory: Path) -> PictureTokens | None:
    """How prompts of the model in `directory` write pictures; None: it reads none."""
    config = directory / "config.json"
    content = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    family = family_of(content.get("model_type")).pictures
    if family is None:
        return None
    processor = load_processor(str(directory))
    before, token, after = (content[field] for field in family.tokens)
    return PictureTokens(
        before, token, after, lambda width, height: family.count(processor, width, height), processor.to_json_string()
    )


class PictureReader:
    """The pictures of datasets for one model.

    Args:
        lm: the model.
        checkpoint: its directory, with its processor's config.
        folders: of pictures.
    """

    def __init__(self, lm: Any, checkpoint: Path, folders: Sequence[Path]) -> None:
        family = family_of(lm.config.model_type).pictures
        assert family is not None
        self._lm, self._family, self._files = lm, family, PictureFiles(folders)
        self._processor = load_processor(str(checkpoint))
        self._token: int = getattr(lm.config, family.tokens[1])
        self._sizes: dict[str, PictureSize] = {}
        self._pixels, self._features = TensorCache(self._read), TensorCache(self._compute)

    def size(self, digest: str) -> PictureSize:
        """Raises ValueError: there is no such picture, or it is damaged."""
        if digest not in self._sizes:
            self._pixels(digest)
        return self._sizes[digest]

    def _read(self, digest: str) -> Tensor:
        """[patches, numbers of a patch]"""
        from PIL import Image

        with Image.open(self._files.path(digest), formats=list(ENDINGS)) as image:
            found = self._processor(images=[image.convert("RGB")], return_tensors="pt")
            count = self._family.count(self._processor, *image.size)
        self._sizes[digest] = PictureSize(found["image_grid_thw"], count)
        pixels: Tensor = found["pixel_values"]
        return pixels

    def in_rows(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The pictures of rows of ids, in order."""
        return [digest for ids in rows for digest in pictures_in(ids, lambda one: self.size(one).num_tokens)]

    def as_tokens(self, ids: Tensor) -> Tensor:
        """Ids as transformers has them."""
        return ids.masked_fill(ids < 0, self._token)

    def grids(self, digests: Sequence[str]) -> Tensor:
        """[pictures, 3]"""
        return torch.cat([self.size(digest).grid for digest in digests])

    def pixels(self, digests: Sequence[str]) -> Tensor:
        """[patches of all pictures, numbers of a patch]"""
        return torch.cat([self._pixels(digest) for digest in digests])

    def entering(self, ids: Tensor) -> dict[str, Tensor]:
        """The input of the language model for padded rows of ids [B, S]: embeddings and positions, or only ids of rows
        without pictures."""
        is_picture = ids < 0
        if not bool(is_picture.any()):
            return {"input_ids": ids}
        digests, device = self.in_rows(ids.tolist()), ids.device
        with torch.no_grad():
            features = torch.cat([self._features(digest) for digest in digests])
        embeddings = self._lm.get_input_embeddings()(ids.clamp(min=0))
        embeddings = embeddings.masked_scatter(is_picture[..., None], features.to(embeddings))
        positions, _ = self._lm.model.get_rope_index(
            self.as_tokens(ids), mm_token_type_ids=is_picture.int(), image_grid_thw=self.grids(digests).to(device)
        )
        return {"inputs_embeds": embeddings, "position_ids": positions}

    def _compute(self, digest: str) -> Tensor:
        """Features [tokens, H] of a picture."""
        device = self._lm.get_input_embeddings().weight.device
        return features_of(self._lm, self._pixels(digest).to(device), self.size(digest).grid.to(device))


def features_of(lm: Any, pixels: Tensor, grid: Tensor) -> Tensor:
    """Features [tokens, H] of one picture, by the class's own method."""
    # `type`: an instance's may be `one_by_one`.
    out = type(lm.model).get_image_features(lm.model, pixels, grid, return_dict=True)
    found: Tensor = torch.cat(tuple(out.pooler_output))
    return found


def read_one_by_one(lm: Any) -> None:
    """Have transformers' own forward take each picture through the tower by itself."""

    def one_by_one(pixel_values: Tensor, image_grid_thw: Tensor, **options: Any) -> Any:
        parts = pixel_values.split(image_grid_thw.prod(-1).tolist())
        found = [features_of(lm, part, grid[None]) for part, grid in zip(parts, image_grid_thw, strict=True)]
        return SimpleNamespace(pooler_output=tuple(found))

    lm.model.get_image_features = one_by_one
