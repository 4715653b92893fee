"""NaN and infinities in tensors, in files of them, in rows, and in what is carried from step to step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from xray_runtime.algorithms.finite import all_finite
from xray_runtime.algorithms.kl import KLController
from xray_runtime.algorithms.rewards import RunningMoments
from xray_runtime.algorithms.statistics import explained_variance
from xray_runtime.data.ragged import Ragged, non_finite
from xray_runtime.kernel.errors import NonFiniteError
from xray_runtime.models.weight_files import check_finite

WRONG = [math.nan, math.inf, -math.inf]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", WRONG)
def test_one_number_is_enough(dtype: torch.dtype, value: float) -> None:
    x = torch.ones(3, 5, dtype=dtype)
    assert all_finite(x)
    x[2, 3] = value
    assert not all_finite(x)
    assert all_finite(x[:2])


def test_empty_and_integer_tensors_are_finite() -> None:
    assert all_finite(torch.zeros(0, 4))
    assert all_finite(torch.tensor([2**31], dtype=torch.int64))
    # The largest floats there are: a sum of them would overflow.
    assert all_finite(torch.full((8,), torch.finfo(torch.float32).max))
    eight_bits = torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)
    assert not all_finite(eight_bits)
    assert all_finite(eight_bits[:1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_with_a_weight_that_is_not_finite_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    good = {"a": torch.ones(4, dtype=dtype), "ids": torch.arange(3)}
    save_file(good, tmp_path / "model.safetensors")
    (tmp_path / "critic").mkdir()
    check_finite(tmp_path)
    save_file(good | {"b": torch.tensor([1.0, math.nan], dtype=dtype)}, tmp_path / "critic" / "value_head.safetensors")
    with pytest.raises(NonFiniteError, match=r"^critic/value_head\.safetensors: b has numbers that are not finite$"):
        check_finite(tmp_path)


def test_rows_are_named() -> None:
    values = Ragged.of([[1.0, 2.0], [3.0], [4.0, math.nan, math.inf], [math.nan]], np.float32)
    assert non_finite({"ids": np.arange(4), "values": values}) == "values of 2 of 4 rows (the first: row 2)"
    assert non_finite({"x": np.array([0.0, math.inf, 1.0])}) == "x of 1 of 3 rows (the first: row 1)"
    assert non_finite({"ids": np.arange(4), "values": values[:2]}) is None


@pytest.mark.parametrize("value", WRONG)
def test_nothing_that_is_carried_on_takes_one_in(value: float) -> None:
    kl = KLController(0.1, 4.0, 2000.0)
    with pytest.raises(NonFiniteError, match=f"^the KL to the reference is {value}$"):
        kl.update(value, 8)
    assert kl.coef == 0.1
    moments = RunningMoments()
    moments.update([1.0, 3.0])
    with pytest.raises(NonFiniteError, match=r"^a reward in the running moments is not finite$"):
        moments.update([2.0, value])
    assert (moments.count, moments.mean, moments.std) == (2, 2.0, 1.0)


def test_variance_that_is_not_known_is_not_explained_to_be_none() -> None:
    values, mask = torch.tensor([[1.0, 2.0]]), torch.ones(1, 2)
    assert math.isnan(explained_variance(values, torch.tensor([[1.0, math.nan]]), mask))
    assert explained_variance(values, torch.ones(1, 2), mask) == 0.0
