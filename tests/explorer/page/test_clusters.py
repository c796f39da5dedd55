"""Three clusters under three norms, side by side."""

import numpy as np
import pytest

pytestmark = pytest.mark.browser


def points(panel):
    (found,) = [item for item in panel["items"] if item.get("pick")]
    return np.array(found["at"])


def test_each_panel_shows_its_own_norm_of_the_same_points(pictures):
    for picture in pictures(*({"scene": "clusters", "cloud": "clusters", "stage": stage} for stage in (0, 1.5, 2, 4))):
        arms = picture["computed"]["arms"]
        assert [panel["title"] for panel in picture["panels"]] == ["BatchNorm", "LayerNorm", "RMSNorm"]
        for panel, mode in zip(picture["panels"], ["batch", "layer", "rms"], strict=True):
            assert points(panel) == pytest.approx(np.array(arms[mode]["shown"]))
            farthest = np.linalg.norm(points(panel), axis=1).max()
            # The farthest points may stand in the margins.
            assert farthest <= picture["radius"] / 0.9 * (1 + 1e-12)


def test_layernorm_puts_two_clusters_that_differ_by_their_mean_onto_one_another(pictures):
    (picture,) = pictures({"scene": "clusters", "cloud": "clusters", "stage": 2})
    groups = np.array(picture["computed"]["groups"])
    spans = {}
    for panel, mode in zip(picture["panels"], ["batch", "layer", "rms"], strict=True):
        means = np.stack([points(panel)[groups == group].mean(0) for group in range(3)])
        within = np.sqrt(np.mean([points(panel)[groups == group].var(0).sum() for group in range(3)]))
        spans[mode] = np.linalg.norm(means[1] - means[0]) / within
    assert spans["layer"] < 0.7 < 1.3 < spans["rms"] < spans["batch"]


def test_each_panel_has_the_sets_of_its_norm(pictures):
    (picture,) = pictures({"scene": "clusters", "cloud": "clusters", "stage": 2})
    batch, layer, rms = ({item.get("colour", item.get("colours")) for item in panel["items"] if item["kind"] != "label"
                          and not isinstance(item.get("colours"), list)} for panel in picture["panels"])  # fmt: skip
    assert "third" in layer
    assert "third" not in rms | batch
    assert "contrast" in layer & rms
    assert "contrast" not in batch
    assert "ink" in batch


def test_below_each_panel_stand_the_means_and_lengths_of_its_points(modules, page_data):
    places = modules.run(
        """async (data) => {
          const { compute } = await load("computation.js");
          const { frame } = await load("frames.js");
          const { startFrom } = await load("state.js");
          const state = startFrom({ scene: "clusters", cloud: "clusters", stage: 2, eps: 0 });
          const box = { x: 0, y: 0, width: 128, height: 100 };
          return frame(state, compute(state, data)).panels.map(({ strip }) =>
            strip(box).filter(({ type }) => type === "marker").map(({ x, y }) => [x, y > 50]));
        }""",
        page_data,
    )
    means, lengths = (np.array([[x for x, below in panel if below == wanted] for panel in places]) for wanted in (0, 1))
    assert means.shape == lengths.shape == (3, 48)
    # BatchNorm, LayerNorm, RMSNorm: 0, in the middle of its line, is every mean of LayerNorm alone.
    assert (np.ptp(means, axis=1) < 1e-9).tolist() == [False, True, False]
    assert means[1] == pytest.approx(np.full(48, 64))
    assert (np.ptp(lengths, axis=1) < 1e-9).tolist() == [False, True, True]
