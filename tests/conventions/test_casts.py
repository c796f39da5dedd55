"""Where each kind of casts rounds."""

from __future__ import annotations

import torch

from normkit import specs
from normkit.conventions.casts import Casts


def test_where_16_bits_round():
    half, wide = torch.bfloat16, torch.float32
    assert specs.LLAMA.casts.narrow_dtypes(half, half, half) == {half}
    assert specs.LLAMA.casts.narrow_dtypes(half, wide, wide) == {half}
    assert specs.OLMO2.casts.narrow_dtypes(half, wide, wide) == set()
    assert Casts(cast="weight").narrow_dtypes(wide, torch.float16, wide) == {torch.float16}
    assert Casts(cast="weight").narrow_dtypes(wide, None, wide) == set()


def test_early_casts_are_one_order_where_all_have_one_dtype():
    early = [Casts(cast=cast) for cast in ("early", "weight", "input")]
    assert len({each.order(has_wide_weight=False) for each in early}) == 1
    assert len({each.order(has_wide_weight=True) for each in early}) == 3
    assert Casts().order(has_wide_weight=False) != early[0].order(has_wide_weight=False)
