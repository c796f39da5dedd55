"""The clouds of the page: finite points with a group each, those that the scenes ask for among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from normkit.errors import InputError
from normkit.explorer.clouds import BIAS, GAIN, cloud, clouds


@pytest.mark.parametrize(
    ("name", "n", "least"), [("scatter", 3, 20), ("four", 4, 20), ("clusters", 3, 30), ("small", 3, 6)]
)
def test_the_clouds_of_the_scenes(name: str, n: int, least: int) -> None:
    found = cloud(name)
    assert found.points.dtype == torch.float64
    assert found.points.shape[1] == n == clouds()[name]["n"]
    assert len(found.points) == len(found.groups) >= least
    assert bool(found.points.isfinite().all())
    assert set(found.groups) <= set(range(8))
    assert found.label


def test_one_cloud_has_rows_on_which_eps_decides() -> None:
    rows = cloud("small").points.tolist()
    assert [0.0, 0.0, 0.0] in rows
    assert any(row[0] == row[1] == row[2] != 0 for row in rows)


@pytest.mark.browser
def test_the_sliders_start_where_the_page_starts_them(modules: Callable[..., Any]) -> None:
    defaults = modules("state.js", "DEFAULTS")
    assert (tuple(defaults["gain"][:3]), tuple(defaults["bias"][:3])) == (GAIN, BIAS)


def test_another_name_is_refused() -> None:
    with pytest.raises(InputError, match=r"the clouds of the page are .*scatter.*got 'rain'"):
        cloud("rain")
