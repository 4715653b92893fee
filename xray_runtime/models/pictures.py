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
from typing import Any

import torch
from torch import Tensor

from xray_runtime.data.picture_reader import read_picture
from xray_runtime.data.pictures import PictureFiles, PictureTokens, pictures_in
from xray_runtime.data.tokenizer import Tokenizer
from xray_runtime.models.family import family_of, token_id

PROCESSOR = "preprocessor_config.json"
CACHE_BYTES = 2**28
"""Bytes of features that are kept."""


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


def picture_tokens(directory: Path, tokenizer: Tokenizer) -> PictureTokens | None:
    """How prompts of the model in `directory` write pictures; None: it reads none."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    family = family_of(config.get("model_type")).pictures
    if family is None:
        return None
    processor = load_processor(str(directory))

    def layout(width: int, height: int) -> list[int]:
        return family.layout(processor, tokenizer, config, width, height)

    written = tuple(config[field] for field in family.written)
    # Models with one processor may make different numbers of tokens of a tile.
    rule = processor.to_json_string() + ("" if family.has_grid else str(len(layout(1, 1))))
    around = () if family.around is None else (token_id(tokenizer, family.around),)
    return PictureTokens(written, config["image_token_id"], layout, around, rule)


class PictureReader:
    """The pictures of datasets for one model.

    Args:
        lm: the model.
        checkpoint: its directory, with its processor's config.
        folders: of pictures.
        tokenizer: `causal_lm.load_tokenizer` of `checkpoint`.
    """

    def __init__(self, lm: Any, checkpoint: Path, folders: Sequence[Path], tokenizer: Tokenizer) -> None:
        family, written = family_of(lm.config.model_type).pictures, PictureTokens.of(tokenizer)
        assert family is not None
        assert written is not None
        self._lm, self._family, self._files, self._written = lm, family, PictureFiles(folders), written
        self._processor = load_processor(str(checkpoint))
        self._layouts: dict[str, Tensor] = {}
        self._grids: dict[str, Tensor] = {}
        self._features = TensorCache(self._compute)

    def layout(self, digest: str) -> Tensor:
        """The ids of a picture's tokens. Raises ValueError: there is no such picture, or it is damaged."""
        if digest not in self._layouts:
            image, _ = read_picture(self._files.path(digest))
            self._layouts[digest] = torch.tensor(self._written.layout(*image.size))
        return self._layouts[digest]

    def read(self, digest: str) -> dict[str, Tensor]:
        """The output of transformers' processor for one picture."""
        image, _ = read_picture(self._files.path(digest))
        return dict(self._processor(images=[image], return_tensors="pt"))

    def in_rows(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The pictures of rows of ids, in order."""
        return [digest for ids in rows for digest in pictures_in(ids, lambda one: len(self.layout(one)))]

    def as_tokens(self, ids: Tensor, digests: Sequence[str]) -> tuple[Tensor, Tensor]:
        """(ids as transformers has them, where the tower's features stand) of ids with these pictures, in order."""
        tokens = ids.clone()
        tokens[ids < 0] = torch.cat([self.layout(digest) for digest in digests]).to(ids)
        return tokens, (ids < 0) & (tokens == self._written.token)

    def features(self, digests: Sequence[str]) -> Tensor:
        """[1 + D, N, H] of pictures; D: layers of the language model that get features of their own (DeepStack)."""
        return torch.cat([self._features(digest) for digest in digests], 1)

    def entering(self, ids: Tensor) -> dict[str, Any]:
        """The input of the language model for padded rows of ids [B, S]: embeddings and positions, or only ids of rows
        without pictures."""
        if not bool((ids < 0).any()):
            return {"input_ids": ids}
        digests = self.in_rows(ids.tolist())
        tokens, is_feature = self.as_tokens(ids, digests)
        embeddings = self._lm.get_input_embeddings()(tokens)
        first, *deep = self.features(digests).to(embeddings)
        given: dict[str, Any] = {"inputs_embeds": embeddings.masked_scatter(is_feature[..., None], first)}
        if deep:
            given |= {"visual_pos_masks": is_feature, "deepstack_visual_embeds": deep}
        if self._family.has_grid:
            given["position_ids"], _ = self._lm.model.get_rope_index(tokens, **self._grid(digests, is_feature))
        return given

    def prompting(self, ids: Tensor) -> dict[str, Any]:
        """The input of transformers' `generate` for prompts [B, S], padded on the left; the attention mask apart."""
        if not bool((ids < 0).any()):
            return {"input_ids": ids}
        digests = self.in_rows(ids.tolist())
        tokens, is_feature = self.as_tokens(ids, digests)
        features = self.features(digests).to(self._lm.get_input_embeddings().weight)
        encoded = {"image": SimpleNamespace(**self._family.encoded(features))}
        return {"input_ids": tokens, "mm_encoder_outputs": encoded} | self._grid(digests, is_feature)

    def _grid(self, digests: Sequence[str], is_feature: Tensor) -> dict[str, Tensor]:
        """The arguments of positions that follow a grid."""
        if not self._family.has_grid:
            return {}
        grids = torch.cat([self._grids[digest] for digest in digests]).to(is_feature.device)
        return {"mm_token_type_ids": is_feature.int(), "image_grid_thw": grids}

    @torch.no_grad()
    def _compute(self, digest: str) -> Tensor:
        """Features [1 + D, N, H] of a picture."""
        device, read = self._lm.get_input_embeddings().weight.device, self.read(digest)
        features = features_of(self._lm, {name: tensor.to(device) for name, tensor in read.items()})
        if self._family.has_grid:
            self._grids[digest] = read["image_grid_thw"]
        expected = int((self.layout(digest) == self._written.token).sum())
        if features.shape[1] != expected:
            # transformers' own arithmetic of sizes, and that of a tower, may be those of two configs.
            raise ValueError(f"the picture {digest} has {features.shape[1]} features for {expected} tokens")
        return features


def features_of(lm: Any, read: dict[str, Tensor]) -> Tensor:
    """Features [1 + D, N, H] of one picture, of what the processor `read` in it."""
    out = lm.model.get_image_features(**read, return_dict=True)
    parts = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
    # transformers has tensors by picture, or one of all tiles.
    return torch.stack([torch.cat(tuple(part)) for part in parts])
