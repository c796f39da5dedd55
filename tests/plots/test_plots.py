import subprocess
import sys

import pytest

from normkit import plots


def test_every_public_name_resolves():
    for name in plots.__all__:
        assert getattr(plots, name).__name__ == name
    assert plots.three_steps.__module__ == "normkit.geometry.space_figures"
    with pytest.raises(AttributeError, match=r"'normkit\.plots' has no attribute 'no_such'"):
        _ = plots.no_such


@pytest.mark.exhaustive
@pytest.mark.slow
def test_importing_the_figures_loads_no_matplotlib():
    modules = "normkit.plots.gallery, normkit.study.figures"
    code = f"import sys, {modules}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
