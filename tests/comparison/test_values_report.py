"""Stored values in words."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from torch import Tensor

from normkit.comparison.values import compare_values
from normkit.comparison.values_report import describe_values
from normkit.comparison.weights import weights_of
from normkit.show.terminal import section
from planted_gains import gains


def shown(port: dict[str, Tensor], *, width: int = 80) -> str:
    reference = replace(weights_of(gains(), name="folder"), runtime="transformers", architecture="gemma2")
    values = compare_values(replace(weights_of(port, name="port"), runtime="llama.cpp"), reference)
    console = Console(width=width)
    with console.capture() as capture:
        console.print(section(describe_values(values)))
    return capture.get()


def test_a_right_port_is_one_line() -> None:
    text = shown({name: value.float() + 1 for name, value in gains().items()})
    assert "+ the same  all 7 tensors of norms are what the port should store." in text
    assert "all 7 gains  reference + 1; as llama.cpp stores it" in text


def test_what_is_wrong_comes_first_and_says_what_it_does() -> None:
    port = {name: value.float() + 1 + (name.endswith("mlp_norm.weight")) for name, value in gains().items()}
    del port["model.norm.weight"]
    text = shown(port, width=200)
    assert "x different  3 of 6 tensors of norms are wrong; 1 is missing." in text
    assert "3 gains of mlp_norm" in text
    assert "reference + 2; doubled: llama.cpp adds nothing to it and computes gains + 1" in text
    assert text.index("missing") < text.index("mlp_norm") < text.index("as llama.cpp stores it")


def test_names_from_a_file_are_made_safe() -> None:
    text = shown({**gains(), "evil\x1b[31m_norm.weight": gains()["model.norm.weight"][:5]})
    assert "\x1b[31m" not in text


def test_two_files_without_norms() -> None:
    empty = weights_of({"a.weight": gains()["model.embed_tokens.weight"]})
    verdict = describe_values(compare_values(empty, empty)).verdict
    assert verdict is not None
    assert verdict.headline == "nothing to compare"
