from __future__ import annotations

import builtins
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import normal
from normkit import reference, specs
from normkit.errors import DtypeError, InputError, ShapeError
from normkit.geometry import selectable, selecting_query, selection, uniform_query

LAYER_NORM = specs.TORCH_LAYER_NORM.replace(eps=0.0)


def margin(query: Tensor, keys: Tensor, index: int) -> float:
    """How much the query prefers one key to the next best."""
    products = keys @ query
    return float(products[index] - products[torch.arange(len(keys)) != index].max())


def hull_of_the_plane(points: Tensor) -> set[int]:
    """Corners of the convex hull by gift wrapping: a second method, for distinct points in general position."""
    corners, start = [], int(points[:, 0].argmin())
    current = start
    while not corners or current != start:
        corners.append(current)
        best = (current + 1) % len(points)
        for other in range(len(points)):
            a, b = points[best] - points[current], points[other] - points[current]
            if float(a[0] * b[1] - a[1] * b[0]) < 0:
                best = other
        current = best
    return set(corners)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_selectable_keys_of_a_plane_are_the_corners_of_its_hull(seed):
    keys = normal(60, 2, seed=seed)
    assert set(selectable(keys).nonzero().flatten().tolist()) == hull_of_the_plane(keys)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 32])
def test_a_query_is_found_exactly_for_the_selectable_keys(d):
    keys = normal(40, d, seed=d) + 3
    answers = selectable(keys)
    for index in range(40):
        query = selecting_query(keys, index)
        assert (query is not None) == answers[index]
        if query is not None:
            assert margin(query, keys, index) == pytest.approx(1, rel=1e-9)


@pytest.mark.slow
@given(d=st.integers(3, 6), dilution=st.floats(0.05, 0.95), seed=st.integers(0, 2**16))
def test_what_lies_between_other_keys_is_never_selectable(d, dilution, seed):
    keys = normal(12, d, seed=seed)
    between = dilution * keys[0] + (1 - dilution) * keys[1]
    assert not selectable(torch.cat([keys, between[None]]))[12]


@pytest.mark.exhaustive
@pytest.mark.slow
@settings(max_examples=40)
@given(d=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_an_invertible_affine_map_changes_no_answer(d, seed):
    keys = normal(15, d, seed=seed)
    mapped = keys @ torch.linalg.qr(normal(d, d, seed=seed + 1))[0] * torch.linspace(1, 20, d) + 5
    assert torch.equal(selectable(mapped), selectable(keys))


def test_the_middle_of_an_edge_ties_with_its_ends():
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]])
    middles = (corners + corners.roll(1, 0)) / 2
    assert selectable(torch.cat([corners, middles])).tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("d", [3, 4, 6, 12, 33])
def test_every_output_of_a_layer_norm_is_selectable_in_every_dimension_above_two(d):
    assert selectable(reference.forward(normal(60, d, seed=d), LAYER_NORM)).all()


def test_the_outputs_of_a_layer_norm_of_two_features_are_two_points():
    keys = reference.forward(normal(60, 2, seed=0), LAYER_NORM)
    assert len(keys.unique(dim=0)) == 2
    assert not selectable(keys).any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("d", "head", "low", "high"),
    [
        pytest.param(8, 2, 0.79, 0.89, id="8 to 2", marks=pytest.mark.slow),
        pytest.param(12, 3, 0.57, 0.71, id="12 to 3", marks=pytest.mark.slow),
    ],
)
def test_a_key_projection_hides_keys_of_a_layer_norm(d, head, low, high):
    shares = []
    for seed in range(7):
        keys = reference.forward(normal(60, d, seed=seed), LAYER_NORM)
        shares.append(1 - float(selectable(keys @ normal(d, head, seed=seed + 100)).double().mean()))
    # 84 % and 64 %, give or take what 7 draws leave open.
    assert low < sum(shares) / 7 < high


@pytest.mark.exhaustive
@pytest.mark.slow
def test_eps_hides_keys_in_few_dimensions():
    spec = LAYER_NORM.replace(eps=0.05)

    def share(d: int) -> float:
        rows = [reference.forward(normal(60, d, seed=seed), spec) for seed in range(10)]
        return sum(1 - float(selectable(row).double().mean()) for row in rows) / 10

    hidden = [share(d) for d in (3, 4, 5, 8)]
    assert 0.5 < hidden[0] < 0.7
    assert hidden == sorted(hidden, reverse=True)
    assert hidden[3] < 0.01


@pytest.mark.parametrize("height", [1e-8, 1e-10, -1e-8, -1e-10])
def test_a_key_beside_an_edge_is_judged(height):
    """The solver gives up (status 15) where the key lies 1e-8 inside of the edge."""
    keys = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.5, height]], dtype=torch.float64)
    assert selectable(keys).tolist() == [True, True, True, True, height < 0]
    query = selecting_query(keys, 4)
    assert (query is None) == (height > 0)
    # Products of 0.5 * 1e10 carry 16 digits.
    assert query is None or margin(query, keys, 4) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("status", [1, 4])
def test_where_the_linear_program_gives_up_another_method_decides(monkeypatch, status):
    keys = normal(25, 2, seed=3)
    answers = selectable(keys)
    given_up = SimpleNamespace(status=status, message="given up", x=None)
    _, nnls = selection._solvers()
    monkeypatch.setattr(selection, "_solvers", lambda: (lambda *_, **__: given_up, nnls))
    assert torch.equal(selectable(keys), answers)
    assert 2 < answers.sum() < 25
    # What the solver calls a solution is held against the keys.
    wrong = SimpleNamespace(status=0, x=torch.ones(2, dtype=torch.float64).numpy())
    monkeypatch.setattr(selection, "_solvers", lambda: (lambda *_, **__: wrong, nnls))
    assert torch.equal(selectable(keys), answers)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0**600, 2.0**-600])
def test_keys_whose_squares_are_no_numbers_are_judged(scale):
    keys = normal(25, 2, seed=3)
    assert torch.equal(selectable(keys * scale), selectable(keys))
    index = int(selectable(keys).nonzero()[0])
    assert torch.equal(selecting_query(keys * scale, index), selecting_query(keys, index) / scale)


def test_repeated_keys_are_not_selectable_up_to_the_rounding_of_their_dtype():
    keys = torch.cat([normal(6, 4), normal(6, 4)[:1]])
    assert selectable(keys).tolist() == [False, True, True, True, True, True, False]
    assert selecting_query(keys, 0) is None
    assert not selectable(torch.ones(3, 2)).any()
    keys = normal(6, 4, seed=20).float()
    keys = torch.cat([keys, keys[:1] * (1 + torch.finfo(torch.float32).eps)])
    assert not torch.equal(keys[6], keys[0])
    assert not selectable(keys)[[0, 6]].any()
    assert selecting_query(keys, 0) is None
    # As float64 numbers the same two are told apart, by the longer one's own direction.
    assert selectable(keys.double())[[0, 6]].any()
    # A single key is preferred by every query.
    assert selectable(torch.ones(1, 3)).tolist() == [True]
    assert torch.equal(selecting_query(torch.ones(1, 3), 0), torch.zeros(3))


@pytest.mark.slow
def test_only_the_keys_asked_for_are_judged_among_all_and_far_from_zero_too():
    keys = normal(30, 2, seed=2)
    indices = torch.randperm(30)[:20]
    answers = selectable(keys)
    assert answers[indices].any()
    assert not answers[indices].all()
    assert torch.equal(selectable(keys, indices), answers[indices])
    assert torch.equal(selectable(keys + 1e8), answers)


def test_no_linear_program_is_needed_on_a_sphere_and_missing_scipy_is_said_elsewhere(monkeypatch):
    original = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.startswith("scipy"):
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    keys = reference.forward(normal(60, 5, seed=3), LAYER_NORM)
    assert selectable(keys).all()
    assert all(margin(selecting_query(keys, index), keys, index) > 0 for index in range(60))
    with pytest.raises(InputError, match=r'need SciPy, which is not installed: pip install "normkit\[study\]"'):
        selectable(normal(30, 2))


def test_single_precision_keys_give_a_single_precision_query():
    keys = normal(20, 3, seed=4).float()
    index = int(selectable(keys).nonzero()[0])
    query = selecting_query(keys, index)
    assert query.dtype == torch.float32
    assert margin(query, keys, index) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("keys", "index", "error", "words"),
    [
        (torch.ones(3), 0, ShapeError, "keys of shape"),
        (torch.ones(0, 3), 0, ShapeError, "keys of shape"),
        (torch.ones(3, 2, dtype=torch.long), 0, DtypeError, "floating"),
        (torch.full((3, 2), math.nan), 0, InputError, "finite keys"),
        (torch.eye(3), -1, ShapeError, "from 0 to 2 .* got .*-1"),
        (torch.eye(3), 3, ShapeError, "from 0 to 2 .* got .*3"),
    ],
)
def test_keys_that_cannot_be_judged(keys, index, error, words):
    for judge in (lambda: selectable(keys, torch.tensor([index])), lambda: selecting_query(keys, index)):
        with pytest.raises(error, match=words):
            judge()


@pytest.mark.parametrize(("d", "n"), [(1, 6), (4, 16), (5, 6)])
def test_attention_to_the_outputs_of_a_layer_norm_is_uniform(d, n):
    gain, bias = 1 + 0.5 * normal(n, seed=5), normal(n, seed=6)
    weight = normal(d, n, seed=7)
    # The sum of the rows is made 1 / gain.
    weight[0] = 1 / gain - weight[1:].sum(0)
    query = uniform_query(weight, gain)
    keys = reference.forward(3 * normal(50, n, seed=8) + 1, LAYER_NORM, gain, bias) @ weight.T
    probabilities = (100 * keys @ query).softmax(0)
    assert float(query.norm()) == pytest.approx(1)
    assert torch.allclose(probabilities, torch.full((50,), 1 / 50, dtype=torch.float64), rtol=1e-11)
    # It is no query that sees nothing: of rows that were not normalized it prefers some.
    assert float((reference.forward(normal(50, n, seed=9), specs.LLAMA) @ weight.T @ query).std()) > 0.1


@pytest.mark.parametrize("gain", [None, 1 + 0.5 * normal(12, seed=10)], ids=["no gain", "gain"])
def test_a_random_projection_has_no_uniform_query(gain):
    assert uniform_query(normal(4, 12, seed=11), gain) is None


def test_as_many_key_features_as_features_always_have_one():
    weight = normal(6, 6, seed=12)
    query = uniform_query(weight)
    seen = weight.T @ query
    assert torch.allclose(seen, seen[:1].expand(6), rtol=1e-10)
    assert (seen > 0).all()
    assert torch.allclose(uniform_query(-weight), -query)


def test_a_gain_of_zero_offers_another_uniform_query():
    gain = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=torch.float64)
    weight = torch.stack([torch.tensor([3.0, 0, 0, 0], dtype=torch.float64), normal(4, seed=13)])
    assert torch.allclose(uniform_query(weight, gain).abs(), torch.tensor([1.0, 0.0], dtype=torch.float64))
    keys = reference.forward(normal(9, 4, seed=14), LAYER_NORM, gain) @ weight.T
    assert float((keys @ uniform_query(weight, gain)).std()) < 1e-15


def test_a_query_that_sees_nothing_is_not_counted():
    weight = torch.cat([normal(2, 8, seed=15), torch.zeros(1, 8, dtype=torch.float64)])
    assert uniform_query(weight) is None
    assert uniform_query(torch.zeros(2, 3)) is None
    # More key features than features: most queries see nothing, one direction is seen as the constant.
    weight = normal(9, 4, seed=16)
    expected = torch.linalg.pinv(weight.T) @ torch.ones(4, dtype=torch.float64)
    assert torch.allclose(uniform_query(weight), expected / expected.norm())


def test_single_precision_is_judged_by_its_own_rounding():
    gain = 1 + 0.5 * normal(64, seed=17)
    weight = normal(8, 64, seed=18)
    weight[3] = 1 / gain + weight[2]
    query = uniform_query(weight.float(), gain.float())
    assert query is not None
    assert query.dtype == torch.float32
    weight[3] += 1e-3 * normal(64, seed=19)
    assert uniform_query(weight.float(), gain.float()) is None


def test_shapes_that_do_not_fit_a_key_projection():
    with pytest.raises(ShapeError, match=r"gain of shape \(n,\) are needed, got \(2, 3\) and \(2,\)"):
        uniform_query(torch.ones(2, 3), torch.ones(2))
    with pytest.raises(ShapeError, match=r"got \(3,\) and None"):
        uniform_query(torch.ones(3))
    with pytest.raises(DtypeError, match="floating"):
        uniform_query(torch.ones(2, 3, dtype=torch.long))
