"""Words that several modules put into messages."""

import pytest

from normkit.text import offer

PATHS = [f"model.layers.{layer}.{name}" for layer in range(30) for name in ("input_layernorm", "post_norm")]


@pytest.mark.parametrize(
    ("name", "known", "listing", "said"),
    [
        ("warmp", ["depth", "warmup"], "", "did you mean warmup?"),
        ("warmp", ["depth", "warmup"], "list", "did you mean warmup? `list` lists them"),
        ("x", [], "list", "there are none"),
        ("x", ["only"], "list", "there is only"),
        ("x", ["one", "two"], "list", "there are one, two"),
        ("zzz", PATHS, "list", f"it is none of 60, such as {', '.join(PATHS[:3])}; `list` lists them"),
        ("layernorm", PATHS, "", f"did you mean {', '.join(PATHS[:10:2])}?"),
        ("*.inputlayernorm", PATHS, "", f"did you mean {', '.join(PATHS[:10:2])}?"),
    ],
)
def test_at_most_five_names_the_nearest_and_what_lists_them_all(name, known, listing, said):
    assert offer(name, known, listing) == said
