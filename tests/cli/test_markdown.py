"""`normkit inspect MODEL --format markdown`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]


@pytest.mark.slow
def test_markdown_is_all_that_is_printed_and_tells_the_command(gpt2: Path, run: Run) -> None:
    done = run("inspect", gpt2, "--max-tokens", "64", "--format", "markdown", "--no-report")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("### No fault found")
    assert re.search(r"\n- loss: \d\.\d{3} nats per token on this text, perplexity \d+", done.stdout)
    assert done.stdout.count("```") == 2
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"normkit inspect .*tiny --max-tokens 64 --no-report --format markdown "
        r"\(normkit \S+, torch \S+, transformers \S+\)",
        last,
    )


def test_it_takes_a_model(run: Run) -> None:
    done = run("inspect", "--format", "markdown")
    assert done.exit_code == 2
    assert "--format needs a MODEL." in done.stderr
