"""Log-probabilities and entropies: closed forms, autograd's own answer, and one [N, V] tensor kept."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from xray_runtime.algorithms.logprobs import chunked_logprobs_and_entropy, logprobs_and_entropy, within_kept


def test_by_hand() -> None:
    # Row 0: p = (1, 2, 5) / 8, so logp of 2 is ln(5/8) = -0.47000 and
    # H = (1/8) ln 8 + (2/8) ln 4 + (5/8) ln(8/5) = 0.25993 + 0.34657 + 0.29375 = 0.90026.
    # Row 1: uniform over 3: ln(1/3) = -1.09861, H = ln 3.
    logits = torch.tensor([[0.0, math.log(2), math.log(5)], [7.0, 7.0, 7.0]])
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([2, 0]))
    torch.testing.assert_close(logprobs, torch.tensor([-0.4700036, -1.0986123]), rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy, torch.tensor([0.9002561, 1.0986123]), rtol=0, atol=1e-6)


def test_temperature_divides_the_logits() -> None:
    # Logits (0, 2 ln 3) at temperature 2 are (0, ln 3): p = (1/4, 3/4).
    logits = torch.tensor([[0.0, 2 * math.log(3)]])
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([0]), temperature=2.0)
    assert logprobs.item() == pytest.approx(math.log(0.25), abs=1e-6)
    assert entropy.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3), abs=1e-6)


def test_gradient_by_hand() -> None:
    # p = (1/4, 3/4), target 1: d logp / dz = (-1/4, 1/4).
    # dH / dz_i = -p_i (ln p_i + H), H = 0.5623351: -(1/4)(-1.3862944 + 0.5623351) = 0.2059898, and the negative.
    for weights, expected in (((1.0, 0.0), 0.25), ((0.0, 1.0), -0.2059898)):
        logits = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
        logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([1]))
        (weights[0] * logprobs + weights[1] * entropy).sum().backward()
        assert logits.grad is not None
        torch.testing.assert_close(logits.grad, torch.tensor([[-expected, expected]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck(temperature: float) -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3, 1])
    assert torch.autograd.gradcheck(lambda z: logprobs_and_entropy(z, targets, temperature), (logits,))
    # Each output alone, too: the other one's gradient is then zero or absent.
    for output in (0, 1):
        assert torch.autograd.gradcheck(lambda z, o=output: logprobs_and_entropy(z, targets, temperature)[o], (logits,))


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 3.0, 100.0]), temperature=st.sampled_from([1.0, 0.5]))
def test_agrees_with_autograd(seed: int, scale: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = scale * torch.randn(4, 9, dtype=torch.float64, generator=generator)
    targets = torch.randint(9, (4,), generator=generator)
    weights = torch.randn(2, 4, dtype=torch.float64, generator=generator)
    ours, theirs = base.clone().requires_grad_(), base.clone().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(ours, targets, temperature)
    categorical = torch.distributions.Categorical(logits=theirs / temperature)
    torch.testing.assert_close(logprobs, categorical.log_prob(targets))
    torch.testing.assert_close(entropy, categorical.entropy())
    (weights[0] * logprobs + weights[1] * entropy).sum().backward()
    (weights[0] * categorical.log_prob(targets) + weights[1] * categorical.entropy()).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def kept_for_backward(dtype: torch.dtype, temperature: float) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    logits = torch.randn(6, 11).to(dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs_and_entropy(logits, torch.zeros(6, dtype=torch.int64), temperature)
    return shapes


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_vocabulary_sized_tensor_is_kept(dtype: torch.dtype, temperature: float) -> None:
    assert kept_for_backward(dtype, temperature).count((6, 11)) == 1


def test_the_plain_way_keeps_more() -> None:
    # What the custom function is for; it also shows that the count above can exceed one.
    shapes = []
    logits = torch.randn(6, 11, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        logp = torch.log_softmax(logits, -1)
        logp.gather(-1, torch.zeros(6, 1, dtype=torch.int64))
        -(logp.exp() * logp).sum(-1)
    assert shapes.count((6, 11)) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    half = (5 * torch.randn(8, 300, generator=torch.Generator().manual_seed(1))).to(dtype)
    targets = torch.arange(8)
    logprobs, entropy = logprobs_and_entropy(half, targets, 0.9)
    exact = torch.distributions.Categorical(logits=half.double() / 0.9)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), exact.log_prob(targets), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), exact.entropy(), rtol=1e-5, atol=1e-5)
    leaf = half.clone().requires_grad_()
    logprobs_and_entropy(leaf, targets)[0].sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1000.0, -1000.0, 0.0], [-1000.0, -1000.0, -1000.0]], requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([1, 0]))
    # Row 0: log p_1 = -1000 - 1000 = -2000 and all mass is on token 0; row 1 is uniform.
    torch.testing.assert_close(logprobs, torch.tensor([-2000.0, -math.log(3)]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, math.log(3)]))
    (logprobs + entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.0, 1.0, 0.0], [2 / 3, -1 / 3, -1 / 3]]))


def test_no_tokens() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(logits, torch.zeros(0, dtype=torch.int64))
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad is not None


@pytest.mark.parametrize(("max_logits", "chunks"), [(280, [7]), (279, [4, 3]), (120, [3, 2, 2]), (39, [1] * 7)])
def test_chunks_are_the_whole(max_logits: int, chunks: list[int]) -> None:
    """7 tokens of 40 logits each: 7, 6, 3 and, since there is no less, 1 at a time, in chunks of nearly equal size."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(5, 40, bias=False, dtype=torch.float64)
    hidden = torch.randn(7, 5, dtype=torch.float64, generator=generator)
    targets = torch.randint(40, (7,), generator=generator)
    weights = torch.randn(2, 7, dtype=torch.float64, generator=generator)
    seen: list[int] = []

    def output_layer(states: torch.Tensor) -> torch.Tensor:
        seen.append(len(states))
        return layer(states)

    def outcome(max_logits: int) -> list[torch.Tensor]:
        states = hidden.clone().requires_grad_()
        layer.zero_grad()
        found = chunked_logprobs_and_entropy(output_layer, states, targets, 0.7, vocab_size=40, max_logits=max_logits)
        (weights * torch.stack(found)).sum().backward()
        assert states.grad is not None
        assert layer.weight.grad is not None
        return [*found, states.grad, layer.weight.grad.clone()]

    whole = outcome(2**20)
    assert seen == [7]
    found = outcome(max_logits)
    # Once forward and, where it is not kept, once more backward, in whatever order.
    assert seen[1 : 1 + len(chunks)] == chunks
    assert sorted(seen[1 + len(chunks) :]) == (sorted(chunks) if len(chunks) > 1 else [])
    for value, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(("on_gpu", "chunks"), [(False, 18), (True, 2)])
def test_a_gpu_makes_more_logits_at_a_time(on_gpu: bool, chunks: int) -> None:
    """3,000 tokens of 100,000 words are 3 · 10⁸ logits: 17.9 times 2²⁴, and 1.1 times
    2²⁸."""
    hidden = torch.empty(3000, 8, device="meta")
    seen: list[int] = []

    def output_layer(states: torch.Tensor) -> torch.Tensor:
        seen.append(len(states))
        return torch.empty(len(states), 100_000, device="meta")

    states = hidden.as_subclass(OnGpu) if on_gpu else hidden
    targets = torch.empty(3000, dtype=torch.int64, device="meta")
    with torch.no_grad():
        chunked_logprobs_and_entropy(output_layer, states, targets, vocab_size=100_000)
    assert len(seen) == chunks


@pytest.mark.parametrize(("backward", "chunks"), [(False, [500, 500, 500]), (True, [1500])])
def test_scores_are_made_of_fewer_tokens_at_a_time(backward: bool, chunks: list[int]) -> None:
    """A chunk has at most 512 tokens where nothing would be computed again, and the scores are the same bits."""
    layer, hidden = torch.nn.Linear(16, 64, bias=False), torch.randn(1500, 16)
    targets, seen = torch.arange(1500) % 64, list[int]()

    def output_layer(states: torch.Tensor) -> torch.Tensor:
        seen.append(len(states))
        return layer(states)

    with torch.set_grad_enabled(backward):
        found = chunked_logprobs_and_entropy(output_layer, hidden, targets, vocab_size=64)
        whole = logprobs_and_entropy(layer(hidden), targets)
    assert seen == chunks
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def test_no_tokens_are_no_chunk() -> None:
    layer = torch.nn.Linear(5, 40)
    found = chunked_logprobs_and_entropy(layer, torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), vocab_size=40)
    assert [x.shape for x in found] == [(0,), (0,)]
    sum(x.sum() for x in found).backward()  # type: ignore[union-attr]
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


def peak_bytes(num_tokens: int, vocabulary: int, max_logits: int) -> int:
    """Most bytes that a forward and backward pass holds at a time, by torch's record of every allocation."""
    from torch.profiler import ProfilerActivity, profile

    layer = torch.nn.Linear(4, vocabulary, bias=False)
    hidden, targets = torch.randn(num_tokens, 4, requires_grad=True), torch.arange(num_tokens)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        found = chunked_logprobs_and_entropy(layer, hidden, targets, vocab_size=vocabulary, max_logits=max_logits)
        sum(x.sum() for x in found).backward()  # type: ignore[union-attr]
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def test_memory_does_not_grow_with_the_tokens_of_a_large_vocabulary() -> None:
    """At 150,000 words 32 tokens' logits are 19.2 MB, and no more exist at a time, of 64 tokens or of 256."""
    vocabulary, chunk = 150_000, 4 * 32 * 150_000
    few, many = (peak_bytes(n, vocabulary, max_logits=chunk // 4) for n in (64, 256))
    # Beside them only the gradient of the layer's weight, twice where a chunk's is added.
    assert many < 1.05 * few
    assert many < 4.1 * chunk + 2 * 4 * 4 * vocabulary
    # The whole form keeps them all.
    assert peak_bytes(256, vocabulary, max_logits=2**62) > 2 * 256 * 4 * vocabulary > 3 * many


def test_chunks_are_at_the_temperature_of_the_whole() -> None:
    layer, hidden, targets = torch.nn.Linear(5, 40, dtype=torch.float64), torch.eye(5).double(), torch.arange(5)
    for options in ({"temperature": 0.7}, {}):
        found = chunked_logprobs_and_entropy(layer, hidden, targets, vocab_size=40, max_logits=80, **options)
        torch.testing.assert_close(found, logprobs_and_entropy(layer(hidden), targets, **options))


CANDIDATES = torch.tensor([[2, 0, 2], [1, 6, 0], [3, 3, 3], [5, 4, 1], [0, 1, 2]])
KEPT = torch.tensor([[2, 0, 3], [1, 6, 6], [3, 3, 3], [5, 4, 1], [6, 5, 4]])
"""Ids, some of them twice."""


def random_logits() -> torch.Tensor:
    return torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_candidates_are_gathered_with_their_gradients() -> None:
    """[N, k] targets give what [N] targets give one column after the other."""
    weights = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    ours, theirs = random_logits().requires_grad_(), random_logits().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(ours, CANDIDATES, 0.7)
    columns, (same, *_) = zip(*(logprobs_and_entropy(theirs, ids, 0.7) for ids in CANDIDATES.T), strict=True)
    torch.testing.assert_close(logprobs, torch.stack(columns, 1), rtol=0, atol=0)
    torch.testing.assert_close(entropy, same, rtol=0, atol=0)
    (weights * logprobs).sum().backward()
    (weights * torch.stack(columns, 1)).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(
        lambda z: logprobs_and_entropy(z, CANDIDATES, 0.7), (random_logits().requires_grad_(),)
    )


def in_kept_sets(
    logits: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor, there: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    whole, _ = logprobs_and_entropy(logits, torch.cat([ids, kept], 1), 0.7)
    return within_kept(whole[:, : ids.shape[1]], whole[:, ids.shape[1] :], there)


def test_a_kept_set_by_hand() -> None:
    # p = (1, 2, 5) / 8, of which tokens 0 and 1 are kept: (1, 2) / 3, H = ln 3 − (2/3) ln 2 = 0.6365142.
    logits = torch.tensor([[0.0, math.log(2), math.log(5)]], requires_grad=True)
    kept, there = torch.tensor([[1, 0, 0]]), torch.tensor([[True, True, False]])
    whole, _ = logprobs_and_entropy(logits, torch.cat([torch.tensor([[0, 1]]), kept], 1))
    logprobs, entropy, log_mass = within_kept(whole[:, :2], whole[:, 2:], there)
    torch.testing.assert_close(logprobs, torch.tensor([[1 / 3, 2 / 3]]).log(), rtol=0, atol=1e-6)
    assert entropy.item() == pytest.approx(0.6365142, abs=1e-6)
    assert log_mass.exp().item() == pytest.approx(3 / 8, abs=1e-6)
    # Of token 0: (1 − 1/3, −2/3), and 0 of the token that cannot be.
    logprobs[0, 0].backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[2 / 3, -2 / 3, 0.0]]), rtol=0, atol=1e-6)


def test_a_kept_set_has_the_distribution_of_its_own_logits() -> None:
    logits, there = random_logits(), torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]).bool()
    logprobs, entropy, log_mass = in_kept_sets(logits, KEPT[:, :1], KEPT, there)
    for row, ids in enumerate(KEPT):
        kept = ids[there[row]]
        alone = torch.distributions.Categorical(logits=logits[row, kept] / 0.7)
        torch.testing.assert_close(logprobs[row, 0], alone.log_prob(torch.tensor(0)), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(entropy[row], alone.entropy(), rtol=1e-12, atol=1e-12)
        mass = torch.softmax(logits[row] / 0.7, -1)[kept].sum()
        torch.testing.assert_close(log_mass[row].exp(), mass, rtol=1e-12, atol=1e-12)
    first = KEPT[:, :1]
    assert torch.autograd.gradcheck(lambda z: in_kept_sets(z, first, KEPT, there), (logits.requires_grad_(),))


@pytest.mark.parametrize("max_logits", [1000, 80, 40])
def test_chunks_of_candidates(max_logits: int) -> None:
    layer, hidden = torch.nn.Linear(5, 40, dtype=torch.float64), torch.eye(5).double()
    found = chunked_logprobs_and_entropy(layer, hidden, KEPT, 0.7, vocab_size=40, max_logits=max_logits)
    torch.testing.assert_close(found, logprobs_and_entropy(layer(hidden), KEPT, 0.7), rtol=1e-12, atol=1e-12)
