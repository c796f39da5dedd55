"""`nk.explore`: what is embedded of points, what is thinned and told, and one line for what cannot be shown."""

from __future__ import annotations

import dataclasses
import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch

import normkit as nk
from normkit.errors import DtypeError, InputError, KindError, NormkitError, ShapeError, SpecError
from normkit.explorer.activations import Activations, activations
from normkit.explorer.exploration import explore_models


def cloud(count: int, n: int) -> torch.Tensor:
    return torch.randn(count, n, dtype=torch.float64)


@pytest.mark.parametrize(("n", "scene"), [(3, "three"), (4, "four")])
def test_three_and_four_features_are_shown_in_their_own_space(n: int, scene: str) -> None:
    points = cloud(5, n)
    page = nk.explore(points, labels=list("abcde"), groups=[0, 1, 2, 8, 1], spec=nk.NormSpec(eps=0.5))
    assert page.notes == ()
    assert page.data["given"] == {
        "points": points.tolist(),
        "groups": [0, 1, 2, 0, 1],
        "labels": list("abcde"),
        "n": n,
    }
    start = {"scene": scene, "cloud": "given", "mode": "layer", "eps": 0.5, "place": "inside"}
    assert page.data["start"] == start | {"gain": [1.0] * n, "bias": [0.0] * n}
    assert page.data["models"] == []


def test_gain_and_bias_are_those_that_act() -> None:
    page = nk.explore(cloud(2, 3), spec=nk.specs.GEMMA, weight=[0.5, 0.0, -1.0])
    assert page.data["start"]["mode"] == "rms"
    assert page.data["start"]["gain"] == [1.5, 1.0, 0.0]
    assert page.data["start"]["bias"] == [0.0, 0.0, 0.0]
    assert nk.explore(cloud(2, 3), weight=np.ones(3)).data["start"]["gain"] == [1.0, 1.0, 1.0]
    assert nk.explore(cloud(2, 3), bias=2).data["start"]["bias"] == [2.0, 2.0, 2.0]
    # Without a norm the sliders stay where they are.
    assert not {"gain", "bias"} & nk.explore(cloud(2, 3)).data["start"].keys()


@pytest.mark.parametrize("n", [1, 2, 5, 384])
def test_other_features_are_projected(n: int) -> None:
    weight, bias = cloud(2, n)
    page = nk.explore(cloud(6, n), labels=list("aababc"), groups=range(6), weight=weight, bias=bias, title="mine")
    (model,) = page.data["models"]
    (site,) = model["sites"]
    assert (model["name"], model["tokens"]) == ("mine", ["a", "b", "c"])
    assert (site["n"], site["count"], site["token"]) == (n, 6, [0, 0, 1, 0, 1, 2])
    assert site["groups"] == [0, 1, 2, 3, 4, 5]
    assert site["gain"][0] == pytest.approx(float(weight.sum()) / n**0.5)
    assert page.data["start"] == {
        "scene": "model", "stage": 2, "model": 0, "site": 0, "mode": "layer", "eps": 1e-5, "place": "inside",
    }  # fmt: skip
    assert "given" not in page.data


@pytest.mark.parametrize(
    "points",
    [
        [[1, 2, 3], [4, 5, 6]],
        ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)),
        np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int16),
        torch.tensor([[1, 2, 3], [4, 5, 6]]),
        torch.tensor([[1.0, 2, 3], [4, 5, 6]], requires_grad=True),
        torch.tensor([[1.0, 2, 3], [4, 5, 6]], dtype=torch.bfloat16),
        torch.tensor([[1.0, 2, 3], [4, 5, 6]]).to_sparse(),
        list(torch.tensor([[1.0, 2, 3], [4, 5, 6]], requires_grad=True)),
        np.broadcast_to(np.array([[1.0], [4.0]]), (2, 3)) + np.arange(3.0),
        np.array([[4.0, 5, 6], [1, 2, 3]])[::-1],
        np.array([[1.0, 2, 3], [4, 5, 6]], dtype=">f4"),
        np.array([[1, 2.0, 3], [4, 5, 6]], dtype=object),
    ],
    ids=[
        *("lists", "tuples", "array", "whole", "gradient", "bfloat16", "sparse"),
        *("rows", "broadcast", "reversed", "big-endian", "objects"),
    ],
)
def test_whatever_holds_numbers_will_do(points: object) -> None:
    if isinstance(points, np.ndarray):
        points.flags.writeable = False
    assert nk.explore(points).data["given"]["points"] == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_points_that_are_not_finite_are_left_out_and_counted() -> None:
    points = cloud(6, 3)
    points[1, 0], points[4, 2], points[5, 1] = torch.nan, torch.inf, 1e39
    page = nk.explore(points, labels=list("abcdef"), groups=range(6))
    given = page.data["given"]
    assert page.notes == ("3 of 6 points hold NaN, infinity or more than float32 can, and are left out.",)
    assert (given["labels"], given["groups"]) == (["a", "c", "d"], [0, 2, 3])
    assert given["points"] == points[[0, 2, 3]].tolist()


@pytest.mark.parametrize("n", [3, 7])
def test_very_many_points_are_thinned_evenly_and_that_is_told(n: int) -> None:
    page = nk.explore(torch.arange(100_000, dtype=torch.float64)[:, None] + torch.zeros(n))
    assert page.notes == ("2,000 of 100,000 points are shown, evenly spread over them all.",)
    labels = page.data["given"]["labels"] if n == 3 else page.data["models"][0]["tokens"]
    steps = np.diff([int(label) for label in labels])
    assert (len(labels), labels[0], labels[-1]) == (2000, "1", "100000")
    assert set(steps) == {50, 51} or set(steps) == {50}


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_one_point_is_a_page(n: int) -> None:
    assert nk.explore(cloud(1, n)).html()


def test_labels_are_cut_to_a_line_and_can_be_written() -> None:
    page = nk.explore(cloud(3, 3), labels=["x" * 100, 7, "\ud800"])
    assert page.data["given"]["labels"] == ["x" * 79 + "…", "7", "?"]
    page.html().encode()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"points": []}, ShapeError, "of shape (N, n)"),
        ({"points": [1.0, 2.0]}, ShapeError, "got (2,)"),
        ({"points": torch.ones(2, 3, 4)}, ShapeError, "got (2, 3, 4)"),
        ({"points": torch.ones(3, 0)}, ShapeError, "got (3, 0)"),
        ({"points": torch.ones(0, 3)}, InputError, "at least one point"),
        ({"points": [[torch.nan, 1, 2], [1, 2, torch.inf]]}, InputError, "got 2 with NaN"),
        ({"points": [[1.0], [1.0, 2.0]]}, KindError, "lists of numbers of one length"),
        ({"points": "abc"}, KindError, "must be a tensor, an array or lists"),
        ({"points": None}, KindError, "must be a tensor, an array or lists"),
        ({"points": torch.ones(2, 3, device="meta")}, KindError, "no values"),
        ({"points": torch.ones(2, 3, dtype=torch.complex64)}, DtypeError, "real numbers, got torch.complex64"),
        ({"points": torch.ones(2, 3, dtype=torch.bool)}, DtypeError, "real numbers, got torch.bool"),
        ({"labels": ["a"]}, ShapeError, "labels must be one for each of the 2 points, got 1"),
        ({"labels": "ab"}, KindError, "got the text 'ab'"),
        ({"groups": [0, 1, 2]}, ShapeError, "groups must be one for each of the 2 points, got 3"),
        ({"groups": [0, -1]}, KindError, "whole numbers from 0"),
        ({"groups": [0.5, 1]}, KindError, "whole numbers from 0"),
        ({"groups": ["a", "b"]}, KindError, "groups must be"),
        ({"weight": [1.0, 2.0]}, ShapeError, "weight must have one number for each of the 3 features, got shape (2,)"),
        ({"bias": torch.ones(3, 1)}, ShapeError, "bias must have one number"),
        ({"weight": [1.0, 2.0, torch.nan]}, InputError, "weight must be finite"),
        ({"weight": "wide"}, KindError, "weight must be"),
        ({"weight": [1, 2, 3j]}, DtypeError, "weight must be real"),
        ({"weight": [1, 2, 101]}, InputError, "from -100 to 100, and gain reaches 101"),
        ({"spec": torch.nn.LayerNorm(3)}, KindError, "must be a NormSpec, got LayerNorm"),
        ({"spec": nk.specs.LLAMA, "bias": [0.0, 0, 0]}, SpecError, "the spec has none"),
        ({"spec": nk.specs.SCALE_NORM}, SpecError, "the page cannot draw y = "),
        ({"spec": nk.specs.TORCH_RMS_NORM, "points": cloud(2, 3)}, SpecError, "its eps is 2.22045e-16"),
    ],
)  # fmt: skip
def test_one_line_for_what_cannot_be_shown(arguments: dict, error: type[NormkitError], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        nk.explore(**{"points": [[1.0, 2.0, 3.0], [4.0, 5.0, 7.0]], **arguments})
    assert "\n" not in str(caught.value)


def test_no_gain_is_refused_in_the_projection() -> None:
    # There are no sliders there.
    assert nk.explore(cloud(4, 5), weight=1000.0).data["models"][0]["sites"][0]["gain"][0] == pytest.approx(
        1000 * 5**0.5
    )


# The page.


def test_the_same_bytes_again_and_one_file(tmp_path: Path) -> None:
    points = cloud(30, 9)
    one = nk.explore(points).write_html(tmp_path / "deep" / "one.html")
    two = nk.explore(points.clone()).write_html(str(tmp_path / "two.html"))
    assert one.read_bytes() == two.read_bytes()
    assert [path.name for path in one.parent.iterdir()] == ["one.html"]
    with pytest.raises(InputError, match="cannot write"):
        nk.explore(points).write_html(tmp_path)


def test_it_is_frozen_and_a_notebook_shows_it_in_a_sandbox() -> None:
    page = nk.explore(cloud(2, 3), title='a "title" <b>')
    shown = page._repr_html_()
    assert shown.startswith('<iframe title="a &quot;title&quot; &lt;b&gt;" sandbox="allow-scripts allow-downloads"')
    assert shown.count("<") == 2
    source = shown.split('srcdoc="')[1].removesuffix('"></iframe>')
    assert unescape(source) == page.html()
    with pytest.raises(dataclasses.FrozenInstanceError):
        page.data = {}


# Models.


@pytest.fixture(scope="module")
def gathered() -> Activations:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6))
    return activations(model, {"input": torch.randn(3, 1000, 6)}, name="small")


def test_activations_are_shown_with_their_notes_and_nothing_else_goes_with_them(gathered: Activations) -> None:
    page = nk.explore(gathered, title="Of a model")
    (shown,) = page.data["models"]
    assert page.data["title"] == "Of a model"
    assert (shown["name"], [site["path"] for site in shown["sites"]]) == ("small", ["1"])
    assert shown["sites"][0]["count"] == 2000
    assert page.notes == ("small: each norm shows 2,000 of 3,000 tokens, evenly spread.",)
    assert page.data["start"] == {
        "scene": "model", "stage": 2, "model": 0, "site": 0, "mode": "layer", "eps": 1e-5, "place": "inside",
    }  # fmt: skip
    with pytest.raises(InputError, match="leave out labels"):
        nk.explore(gathered, labels=["a", "b", "c"])


def test_models_share_the_points_of_a_page_whose_data_is_plain_json(gathered: Activations) -> None:
    counts = [shown["sites"][0]["count"] for shown in explore_models([gathered] * 3).data["models"]]
    assert counts == [666, 666, 666]
    for page in (nk.explore(gathered), nk.explore(cloud(3, 4)), nk.explore(cloud(3, 9))):
        assert json.loads(json.dumps(page.data, allow_nan=False)) == page.data
        assert page.data.keys() >= {"schema", "title", "notes", "start", "clouds", "models"}
