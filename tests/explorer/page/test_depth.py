"""The page's stacks of random layers against the same in PyTorch, gradients by autograd."""

import math

import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.browser

RUN = """async (options) => {
  const { stack, weights } = await load("depth.js");
  return { arms: stack(options), given: weights(options) };
}"""


def options(depth=6, spread=1.0, residual=True, seed=1):
    return {"depth": depth, "spread": spread, "residual": residual, "seed": seed}


def layer_norm(h):
    return F.layer_norm(h, h.shape[1:])


def rms_norm(h):
    return F.rms_norm(h, h.shape[1:], eps=1e-5)


def batch_norm(h):
    return F.batch_norm(h, None, None, training=True)


def matrix(numbers):
    """Rows of 64, which the page has one after the other."""
    return torch.tensor(numbers, dtype=torch.float64).view(-1, 64)


def same(h):
    return h


# before(), branch() and after() of h -> after(h + branch(f(before(h)))).
ARMS = {
    "none": (same, same, same),
    "post": (same, same, layer_norm),
    "pre": (layer_norm, same, same),
    "rms": (rms_norm, same, same),
    "batch": (same, batch_norm, same),
}


def rerun(arm, given, residual):
    """rms and mean of every layer, and rms of its gradient."""
    before, branch, after = ARMS[arm]
    h = matrix(given["input"]).requires_grad_()
    signals = [h]
    for weight in given["layers"]:
        out = branch(F.relu(before(h) @ matrix(weight).T))
        h = after(h + out if residual else out)
        signals.append(h)
    gradients = torch.autograd.grad((h * matrix(given["readout"])).sum(), signals)
    signals = [h.detach() for h in signals]
    return {
        "rms": [h.square().mean().sqrt() for h in signals],
        "mean": [h.mean() for h in signals],
        "gradient": [gradient.square().mean().sqrt() for gradient in gradients],
    }


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("depth", "spread"), [(1, 1.0), (7, 0.25), (12, 4.0), (20, 1.0)])
def test_every_stack_is_pytorchs(modules, depth, spread, residual):
    found = modules.run(RUN, options(depth, spread, residual))
    assert list(found["arms"]) == list(ARMS)
    # Norms of nearly equal numbers amplify roundings, layer after layer.
    tolerance = 1e-12 if depth < 10 else 1e-9
    for arm, numbers in found["arms"].items():
        for name, expected in rerun(arm, found["given"], residual).items():
            wanted, values = torch.stack(expected), torch.tensor(numbers[name], dtype=torch.float64)
            assert len(values) == depth + 1
            # A mean can be a small difference of numbers as large as the rms.
            size = torch.tensor(numbers["gradient" if name == "gradient" else "rms"], dtype=torch.float64)
            error = (values - wanted).abs() / size
            assert float(error.max()) <= tolerance, (arm, name)


def test_without_a_residual_centring_after_relu_is_what_makes_gradients_grow(modules):
    found = modules.run(RUN, options(24, 1.0, residual=False))
    arms = found["arms"]
    grown = {arm: (numbers["gradient"][0] / numbers["gradient"][24]) ** (1 / 24) for arm, numbers in arms.items()}
    # The norms that centre multiply gradients by about what they stretch; RMSNorm and no norm leave them.
    for arm in ("post", "pre", "batch"):
        assert 1.15 < grown[arm] < 1.35
        assert grown[arm] == pytest.approx(arms[arm]["stretch"], rel=0.06)
    assert 0.95 < grown["none"] < 1.06
    assert 0.95 < grown["rms"] < 1.06
    assert arms["none"]["stretch"] == 1
    # The stretch is the rms of 1 / s over rows and then the geometric mean over layers.
    h, logs = matrix(found["given"]["input"]), []
    for weight in found["given"]["layers"]:
        h = F.relu(h @ matrix(weight).T)
        logs.append(((h.var(1, correction=0) + 1e-5).reciprocal().mean().sqrt()).log())
        h = layer_norm(h)
    assert arms["post"]["stretch"] == pytest.approx(float(torch.stack(logs).mean().exp()), rel=1e-9)


def test_the_weights_are_as_they_say(modules):
    given = modules("depth.js", "weights", options(depth=10, spread=2.0, seed=3))
    weights = torch.stack([matrix(layer) for layer in given["layers"]])
    assert weights.shape == (10, 64, 64)
    assert matrix(given["input"]).shape == matrix(given["readout"]).shape == (32, 64)
    # N(0, 2 spread**2 / width), to four standard errors of the variance.
    assert float(weights.var()) == pytest.approx(2 * 2.0**2 / 64, rel=4 * math.sqrt(2 / weights.numel()))


def test_spread_scales_and_depth_prolongs_the_same_layers(modules):
    short, wide, other = (
        modules("depth.js", "weights", given)
        for given in (options(depth=2), options(depth=3, spread=2.0), options(depth=2, seed=2))
    )
    torch.testing.assert_close(torch.tensor(short["layers"]) * 2, torch.tensor(wide["layers"][:2]))
    assert short["input"] == wide["input"] != other["input"]
    assert modules("depth.js", "stack", options()) == modules("depth.js", "stack", options())


def test_signals_explode_vanish_and_are_held_and_what_overflows_does_not_crash(modules):
    large, small = (modules("depth.js", "stack", options(48, spread)) for spread in (4.0, 0.25))
    bare = modules("depth.js", "stack", options(48, 0.25, residual=False))
    assert large["none"]["rms"][-1] > 1e25
    assert all(math.isfinite(rms) for rms in large["none"]["rms"])
    assert bare["none"]["rms"][-1] < 1e-25
    assert bare["none"]["gradient"][0] < 1e-25
    for stacks in (large, small, bare):
        # eps takes a part of rows as short as a quarter.
        assert stacks["post"]["rms"][1:] == pytest.approx([1.0] * 48, abs=0.01)
    arms = modules("depth.js", "stack", options(48, 1e40))
    assert math.inf in arms["none"]["rms"] or any(map(math.isnan, arms["none"]["rms"]))
    assert not math.isfinite(arms["none"]["rms"][-1])
    assert arms["post"]["rms"][-1] == pytest.approx(1.0)


def test_what_is_kept_of_another_depth_changes_no_number(modules):
    # The second of each pair goes on from the first, or stops before its end; another seed makes all forget.
    kept, fresh = modules.run(
        """async ([long, short, other]) => {
      const { stack } = await load("depth.js");
      const after = (first, then) => [other, first, then].map(stack).at(-1);
      return [[after(long, short), after(short, long)], [after(other, short), after(other, long)]];
    }""",
        [options(9, 1.5), options(4, 1.5), options(6, seed=8)],
    )
    assert kept == fresh
    assert kept[0] != kept[1]
