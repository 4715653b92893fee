"""Generation by transformers' `generate`: any Hugging Face causal LM, on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from xray_runtime.engines.sampling import EngineRank, Reply, Sampler, Sampling
from xray_runtime.engines.sync.versioned import Tensors
from xray_runtime.engines.top_tokens import TopTokens
from xray_runtime.kernel.signs import part_done
from xray_runtime.models.adapters import Adapters
from xray_runtime.models.causal_lm import load_model, load_tokenizer
from xray_runtime.models.family import family_of
from xray_runtime.models.lora import LoRAConfig
from xray_runtime.models.pictures import PictureReader
from xray_runtime.models.published_names import PublishedNames
from xray_runtime.models.routing import RecordedRoutes, recorded_routes

ROWS = 32
WIDTH_STEP = 32
"""Prompts are padded to a multiple of this. Float rounding depends on a matrix's shape, which must depend on the prompt
alone, not on the rest of the batch."""


class TransformersSampler(Sampler):
    """One model under `generate`, or one with an adapter that each update replaces."""

    def __init__(self, directory: Path, rank: EngineRank, adapter: LoRAConfig | None = None) -> None:
        self._lm: Any = prepared(load_model(directory)).to(rank.device).eval()
        self._adapters = None
        if adapter is not None:
            self._adapters = Adapters(self._lm, adapter, directory, seed=0)
            self._adapters.load({})
        self._names = PublishedNames(self._lm)
        self._pictures: PictureReader | None = None

    def read_pictures(self, checkpoint: Path, folders: tuple[Path, ...]) -> None:
        self._pictures = PictureReader(self._lm, checkpoint, folders, load_tokenizer(checkpoint))

    def sample(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Reply]:
        generate = self._lm.generate if self._pictures is None else self._generate
        given = generate, self._lm.device, prompts, seeds, sampling
        if not sampling.routes:
            return sample(*given)
        with recorded_routes(self._lm, family_of(self._lm.config.model_type)) as recorded:
            return sample(*given, recorded)

    def _generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> Any:
        """transformers' `generate`, of prompts with or without pictures."""
        assert self._pictures is not None
        # Left over from the previous batch, it would shift the positions of a batch without pictures.
        self._lm.model.rope_deltas = None
        given = self._pictures.prompting(input_ids)
        return self._lm.generate(**given, attention_mask=attention_mask, **options)

    def write(self, tensors: Tensors, version: int) -> None:
        if self._adapters is not None:
            self._adapters.load(dict(tensors))
            return
        for name, tensor in tensors:
            self._names.write(name, tensor)


def prepared(lm: Any) -> Any:
    """`lm`, to sample from."""
    # A checkpoint's recommendations (top-k, penalties, end tokens) would change our sampling.
    lm.generation_config = transformers.GenerationConfig()
    auxiliary = family_of(lm.config.model_type).auxiliary
    if auxiliary is not None:
        # The loss is not read here, and transformers fails to compute it with cached tokens.
        setattr(lm.config, auxiliary.option, False)
    return lm


class SeededSampling(transformers.LogitsProcessor):
    """Draws each row's token with that row's own random numbers, and records its log-probability.

    Gumbel-max: argmax of log p + g, g standard Gumbel, is a sample of p (Gumbel 1954). The returned scores only allow
    the drawn token.
    """

    def __init__(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling, device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed % 2**63) for seed in seeds]
        self._sampling, self._seen = sampling, [_tokens(prompt, device) for prompt in prompts]
        self._limits = transformers.LogitsProcessorList()
        # In vLLM's order.
        if sampling.min_p:
            self._limits.append(transformers.MinPLogitsWarper(sampling.min_p))
        if sampling.top_k is not None:
            self._limits.append(transformers.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._limits.append(transformers.TopPLogitsWarper(sampling.top_p))
        self.logprobs: list[torch.Tensor] = []
        """By step: [B] float32."""
        self.top: list[tuple[torch.Tensor, torch.Tensor]] = []
        """By step: ids and log-probabilities [B, K] of the likeliest tokens, if they are reported."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = self._penalized(scores.float()) / self._sampling.temperature
        logprobs = torch.log_softmax(self._limits(input_ids, scores), -1)
        draws = [torch.rand(scores.shape[1], generator=g, device=scores.device) for g in self._generators]
        gumbel = -torch.log(-torch.log(torch.stack(draws).clamp_(1e-20, 1 - 2**-24)))
        chosen = (logprobs + gumbel).argmax(-1, keepdim=True)
        self.logprobs.append(logprobs.gather(1, chosen)[:, 0])
        if num_top := min(self._sampling.reported, logprobs.shape[1]):
            found = logprobs.topk(num_top)
            self.top.append((found.indices.int().cpu(), found.values.cpu()))
        part_done()
        self._seen = [torch.cat(row) for row in zip(self._seen, chosen, strict=True)]
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)

    def _penalized(self, scores: torch.Tensor) -> torch.Tensor:
        penalty = self._sampling.repetition_penalty
        if penalty == 1.0:
            return scores
        seen = torch.stack(
            [torch.zeros_like(row).index_fill_(0, ids, 1.0) for row, ids in zip(scores, self._seen, strict=True)]
        )
        return torch.where(seen > 0, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def _tokens(prompt: list[int], device: torch.device) -> torch.Tensor:
    """A prompt without its pictures."""
    return torch.tensor([number for number in prompt if number >= 0], device=device)


def stream(lm: Any, prompt: list[int], seed: int, sampling: Sampling) -> Iterator[int]:
    """The tokens of one reply as they are sampled, including the end token."""
    sampler = SeededSampling([prompt], [seed], sampling, lm.device)
    ids, cache = torch.tensor([prompt], device=lm.device), None
    for _ in range(sampling.max_new_tokens):
        # Not around the loop: the caller computes between two tokens.
        with torch.inference_mode():
            out = lm(input_ids=ids, past_key_values=cache, use_cache=True)
            ids, cache = sampler(ids, out.logits[:, -1]).argmax(-1, keepdim=True), out.past_key_values
        token = int(ids)
        yield token
        if token in sampling.stop_token_ids:
            return


def sample(
    generate: Callable[..., Any],
    device: torch.device,
    prompts: list[list[int]],
    seeds: list[int],
    sampling: Sampling,
    recorded: RecordedRoutes | None = None,
) -> list[Reply]:
    """Replies by a `generate` of transformers' form, in batches of fixed shapes, with `recorded` routes."""
    widths = [-(-len(prompt) // WIDTH_STEP) * WIDTH_STEP for prompt in prompts]
    replies: dict[int, Reply] = {}
    for width in sorted(set(widths)):
        alike = [row for row, w in enumerate(widths) if w == width]
        for start in range(0, len(alike), ROWS):
            rows = alike[start : start + ROWS]
            # The batch is filled with its first prompt; those replies are dropped.
            filled = rows + rows[:1] * (ROWS - len(rows))
            own = [prompts[r] for r in filled], [seeds[r] for r in filled]
            replies |= zip(rows, _batch(generate, device, *own, width, sampling, recorded), strict=False)
    return [replies[row] for row in range(len(prompts))]


def _batch(
    generate: Callable[..., Any],
    device: torch.device,
    prompts: list[list[int]],
    seeds: list[int],
    width: int,
    sampling: Sampling,
    recorded: RecordedRoutes | None,
) -> list[Reply]:
    ids = torch.full((len(prompts), width), sampling.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    sampler = SeededSampling(prompts, seeds, sampling, device)
    with torch.inference_mode():
        tokens = generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,
                num_beams=1,
                eos_token_id=list(sampling.stop_token_ids),
                pad_token_id=sampling.pad_token_id,
            ),
            logits_processor=[sampler],
        )[:, width:].tolist()
    logprobs = torch.stack(sampler.logprobs, 1).tolist()
    routes = None if recorded is None else recorded.rows(len(prompts))
    top = [torch.stack(part, 1).numpy() for part in zip(*sampler.top, strict=True)]
    replies = []
    for row, (row_tokens, row_logprobs) in enumerate(zip(tokens, logprobs, strict=True)):
        stops = (number for number, token in enumerate(row_tokens, start=1) if token in sampling.stop_token_ids)
        n = next(stops, len(row_tokens))
        found = None if routes is None else routes.of(row, width - len(prompts[row]), width + n - 1)
        likeliest = TopTokens(*(part[row, :n] for part in top)) if top else None
        replies.append(Reply(row_tokens[:n], row_logprobs[:n], found, likeliest))
    return replies
