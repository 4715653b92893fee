"""What vLLM's own sampler says of what it drew from, read as a reply: without an engine around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from xray_runtime.data.batch import ReplyBatch
from xray_runtime.data.ragged import Ragged
from xray_runtime.engines.generators.vllm.sampler import _reply
from xray_runtime.engines.sampling import Reply, Sampling
from xray_runtime.engines.top_tokens import top_columns
from xray_runtime.methods.common.training.finite import check_rollout

PLACES, VOCABULARY, TEMPERATURE = 40, 300, 0.7
NUM_TOP = 5


def logits() -> torch.Tensor:
    return 3 * torch.randn(PLACES, VOCABULARY, generator=torch.Generator().manual_seed(2))


def drawn(sampling: Sampling) -> Reply:
    """A reply whose places are a batch of vLLM's CPU sampler, collected as its engine does."""
    from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    num_top = min(sampling.reported, VOCABULARY)
    nothing: Any = torch.empty(0)
    metadata = SamplingMetadata(
        temperature=torch.full((PLACES,), sampling.temperature),
        all_greedy=False,
        all_random=True,
        top_p=torch.full((PLACES,), sampling.top_p) if sampling.top_p < 1 else None,
        top_k=None if sampling.top_k is None else torch.full((PLACES,), sampling.top_k, dtype=torch.int32),
        generators={row: torch.Generator().manual_seed(row) for row in range(PLACES)},
        max_num_logprobs=num_top,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(PLACES)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    with torch.compiler.set_stance("force_eager"):
        made = Sampler(logprobs_mode="processed_logprobs")(logits(), metadata)
    flat, found = FlatLogprobs(), made.logprobs_tensors
    for ids, values, rank in zip(
        found.logprob_token_ids.tolist(), found.logprobs.tolist(), found.selected_token_ranks.tolist(), strict=True
    ):
        append_logprobs_for_next_position(flat, ids, values, [None] * len(ids), rank, num_top)
    return _reply(SimpleNamespace(token_ids=made.sampled_token_ids[:, 0].tolist(), logprobs=flat), num_top)


@pytest.mark.parametrize("cut", [{}, {"top_k": 7}, {"top_p": 0.6, "top_k": 128}, {"top_p": 0.8, "top_k": 20}], ids=str)
def test_its_likeliest_tokens_and_what_a_cut_leaves(cut: dict[str, Any]) -> None:
    sampling = Sampling(PLACES, TEMPERATURE, (VOCABULARY,), 0, top_logprobs=NUM_TOP, kept=bool(cut), **cut)
    reply = drawn(sampling)
    assert reply.top is not None
    columns = top_columns([reply.top], [PLACES], sampling.reported, NUM_TOP, kept=sampling.kept)
    ids = Ragged.of([reply.token_ids])
    answer = ReplyBatch(
        response_ids=ids, rollout_logprobs=Ragged.of([reply.logprobs], np.float32), ended=np.zeros(1, bool)
    ).with_columns(**columns)
    check_rollout(answer, 1, sampling)
    whole = torch.softmax(logits().double() / TEMPERATURE, -1)
    ordered, order = whole.sort(descending=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if cut:
        kept = torch.arange(VOCABULARY) < cut["top_k"] + torch.zeros(PLACES, 1)
        left = ordered * kept / (ordered * kept).sum(-1, keepdim=True)
        kept = kept & (left.cumsum(-1) - left < cut.get("top_p", 1.0))
        assert columns["kept_counts"].values.tolist() == kept.sum(-1).tolist()
        sets = np.split(columns["kept_ids"].values, columns["kept_counts"].values.cumsum()[:-1])
        assert [row.tolist() for row in sets] == [sorted(i[k].tolist()) for i, k in zip(order, kept, strict=True)]
    p = ordered * kept / (ordered * kept).sum(-1, keepdim=True)
    there = kept[:, :NUM_TOP].numpy()
    np.testing.assert_array_equal(columns["topk_ids"].values, np.where(there, order[:, :NUM_TOP], -1))
    found = np.exp(columns["topk_logprobs"].values.astype(np.float64))
    np.testing.assert_allclose(found, p[:, :NUM_TOP], rtol=1e-5, atol=1e-12)
    own = p.gather(1, (order == torch.tensor(reply.token_ids)[:, None]).int().argmax(-1, keepdim=True))[:, 0]
    np.testing.assert_allclose(np.exp(reply.logprobs), own, rtol=1e-5)
