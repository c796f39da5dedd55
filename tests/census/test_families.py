"""The census of families: it is what is found now, leaves nobody out, and agrees with what the models' sources say."""

from __future__ import annotations

import re

import pytest
import torch

import configurations
import families
import wiring

# Whole families of transformers.
pytestmark = pytest.mark.slow

PAGE = families.PAGE.read_text(encoding="utf-8")
# Read from each modelling file: norms, placement, final norm, QK-norm, norms a block.
KNOWN = {
    "bart": ("LayerNorm 1e-05 late", "post", "no", "no", "2-3"),
    "bert": ("LayerNorm 1e-12 late", "post", "no", "no", "2"),
    "cohere": ("LayerNorm (no bias) 1e-05 late", "parallel", "yes", "no", "1"),
    "convnext": (
        "LayerNorm over channels 1e-06 late; LayerNorm 1e-06 late; LayerNorm 1e-12 late",
        "in-branch",
        "yes",
        "no",
        "1",
    ),
    "deepseek_v3": ("RMSNorm 1e-06 early", "pre", "yes", "latent", "4"),
    "gemma": ("RMSNorm (1 + w) 1e-06 late", "pre", "yes", "no", "2"),
    "gemma3_text": ("RMSNorm (1 + w) 1e-06 late", "peri", "yes", "per head", "6"),
    "glm": ("RMSNorm 1.5625e-07 early", "pre", "yes", "no", "2"),
    "gpt2": ("LayerNorm 1e-05 late", "pre", "yes", "no", "2"),
    "gpt_neox": ("LayerNorm 1e-05 late", "parallel", "yes", "no", "2"),
    "llama": ("RMSNorm 1e-06 early", "pre", "yes", "no", "2"),
    "minimax": ("RMSNorm 1e-05 early; RMSNorm 1e-06 early", "residual-after-norm", "yes", "no", "2-3"),
    "nanochat": ("RMSNorm (no gain) 1e-06 late", "pre", "yes", "per head", "4"),
    "nemotron": ("LayerNorm (1 + w) 1e-05 late", "pre", "yes", "no", "2"),
    "olmo": ("LayerNorm (no gain or bias) 1e-05 late", "pre", "yes", "no", "2"),
    "olmo2": ("RMSNorm 1e-05 late", "output-only", "yes", "all heads", "4"),
    "persimmon": ("LayerNorm 1e-05 late", "pre", "yes", "per head", "4"),
    "phi": ("LayerNorm 1e-05 late", "parallel", "yes", "no", "1"),
    "qwen3": ("RMSNorm 1e-06 early", "pre", "yes", "per head", "4"),
    "qwen3_next": ("RMSNorm (1 + w) 1e-06 late + 1 gated norm", "pre", "yes", "per head", "2-4"),
    "resnet": ("9 batch norms", "no blocks", "", "no", ""),
    "t5": ("RMSNorm 1e-06 weight", "pre", "yes", "no", "2-3"),
    "vit": ("LayerNorm 1e-12 late", "pre", "yes", "no", "2"),
}


@pytest.fixture(scope="module")
def built() -> dict[str, configurations.Family]:
    """The families by name. To list them is to import every configuration of transformers, which takes seconds."""
    return {family.name: family for family in configurations.families()}


@pytest.fixture(scope="module")
def rows(built) -> dict[str, list[str]]:
    """The cells of each family's row on the page, by its name."""
    lines = re.findall(r"^\| ([^|]+) \| (.*) \|$", PAGE, re.MULTILINE)
    return {name: [name, *rest.split(" | ")] for name, rest in lines if name in built}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KNOWN)
def test_what_the_page_says_is_what_the_source_says(name, rows):
    norms, placement, final, query_key, per_block = KNOWN[name]
    assert rows[name][:6] == [name, norms, placement, final, query_key, per_block]


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(6))
def test_a_sixth_of_the_rows_and_all_of_the_known_are_what_is_found_now(part, built):
    """The known ones hold every kind of norm and placement; `census/families.py --check` asks all."""
    others = [name for name in built if name not in KNOWN]
    names = [*others[::6], *KNOWN][part::6]
    taken = families.take(names)
    assert [facts.family.name for facts in taken] == sorted(names, key=list(built).index)
    lines = PAGE.splitlines()
    assert [row for row in map(families.row, taken) if row not in lines] == []
    assert [line for line in families._unconfigured(taken).splitlines() if line not in lines] == []


def test_every_family_has_its_row_and_every_row_an_answer(built, rows):
    assert rows.keys() == built.keys()
    assert len(rows) >= 300
    for cells in rows.values():
        assert len(cells) == len(families.COLUMNS)
        assert cells[1] not in ("", "none")


def test_each_model_type_is_built_or_has_a_reason(built):
    assert built.keys() | configurations.refused().keys() == set(configurations.model_types())
    assert not built.keys() & configurations.refused().keys()
    for name, reason in configurations.refused().items():
        assert re.search(rf"^- {re.escape(reason)} \(\d+\): .*\b{re.escape(name)}\b", PAGE, re.MULTILINE)


def test_tiny_configurations_keep_every_eps(built):
    changed = {}
    for name, family in built.items():
        tiny = configurations.epsilons(configurations.tiny_configuration(family))
        if tiny != configurations.epsilons(configurations.configuration_class(name)()):
            changed[name] = tiny
    assert changed == {}


def test_an_eps_that_no_field_gives_is_named():
    # DeepSeek's latent norms are built without an eps; SegFormer's with PyTorch's default.
    assert "- longcat_flash: 1e-06; `rms_norm_eps` is 1e-05\n" in PAGE
    assert "- segformer: 1e-05; `layer_norm_eps` is 1e-06\n" in PAGE
    assert "- llama: " not in PAGE


def test_the_rows_of_the_counts_add_up(built):
    header = re.findall(r"^\|  \| (decoder.*) \|$", PAGE, re.MULTILINE)
    assert len(header) == 2
    table = {
        name: list(map(int, cells.split(" | ")))
        for name, cells in re.findall(r"^\| ([^|]+) \| ([\d |]+) \|$", PAGE, re.MULTILINE)
    }
    assert sum(table["families"][::2]) == len(built)
    placed = [sum(column) for column in zip(*(table[name] for name in families.PLACEMENTS), strict=True)]
    assert placed == table["families"]


def test_the_placements_are_counted_from_the_rows():
    sections = dict(re.findall(r"^## (.*)\n\n((?:\|.*\n)+)", PAGE, re.MULTILINE))
    kinds = [[line.split(" | ") for line in sections[title].splitlines()[2:]] for title in families.TITLES.values()]
    table = dict(re.findall(r"^\| ([^|]+) \| ([\d |]+) \|$", PAGE, re.MULTILINE))
    for name in families.PLACEMENTS:
        counts = []
        for cells in kinds:
            # Several placements with their numbers of blocks are mixed.
            of_kind = [each for each in cells if each[2] == name or (name == "mixed" and "," in each[2])]
            counts += [len(of_kind), sum(each[-1][:4] >= str(families.RECENT) for each in of_kind)]
        assert table[name] == " | ".join(map(str, counts))


def test_queries_keep_the_lengths_of_normalized_rows():
    y = torch.randn(1, 6, 2, 8)
    turned = y.flip(-1).transpose(1, 2) * 0.3
    assert wiring.has_rows_of(y, turned)
    assert wiring.has_rows_of(y.flatten(2), turned)
    assert wiring.has_rows_of(y, turned.repeat_interleave(2, 1))
    assert not wiring.has_rows_of(y, torch.randn(1, 2, 6, 8))
    assert not wiring.has_rows_of(y[..., :7], turned)
    assert not wiring.has_rows_of(y[:, :2], turned)
