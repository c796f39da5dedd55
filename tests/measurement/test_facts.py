import math

import pytest

from imagined_inspections import site
from normkit import specs


@pytest.mark.parametrize(
    ("spec", "level"),
    [
        (specs.TORCH_LAYER_NORM, math.sqrt(1e-5)),
        (specs.ANNOTATED_TRANSFORMER, 1e-6 * math.sqrt(63 / 64)),
        (specs.SCALE_NORM, 1e-5 / 8),
        (specs.TORCH_RMS_NORM, 2.0**-11.5),
    ],
)
def test_the_level_of_eps_is_in_the_rms_of_a_row(spec, level):
    # 64 features: a sum of squares is 64 mean squares, and one over n - 1 is 64 / 63 of them.
    assert site("norm", 0, block=None, role="final", rms=1.0, spec=spec).eps_level == pytest.approx(level)
