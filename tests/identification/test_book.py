"""The passports of a model as a file: readable, diffable, and refused where it is anything else."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normkit.errors import IdentificationError, InputError
from normkit.identification.book import PassportBook, survey


def stack(eps: float = 1e-5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=eps), nn.Linear(8, 8), nn.RMSNorm(8, eps=eps))


def surveyed(model: nn.Module, name: str = "stack") -> PassportBook:
    return survey(model, lambda: model(torch.randn(2, 3, 8)), name=name)


@pytest.fixture(scope="module")
def book() -> PassportBook:
    return surveyed(stack())


@pytest.mark.slow
def test_a_model_s_norms_in_forward_order(book: PassportBook) -> None:
    assert [(entry.path, entry.class_name, entry.features) for entry in book.entries] == [
        ("1", "LayerNorm", 8),
        ("3", "RMSNorm", 8),
    ]
    assert [entry.passport.spec.eps for entry in book.entries if entry.passport.spec] == [1e-5, 1e-5]
    assert book.left_out == {}


@pytest.mark.slow
def test_a_model_without_a_name_is_called_by_its_class() -> None:
    assert surveyed(stack(), name="").model == "Sequential"


@pytest.mark.slow
def test_what_normalizes_as_no_spec_describes_is_left_out_with_its_reason() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(8))
    model[0].running_mean.fill_(0.5)
    found = surveyed(model.eval())
    assert [entry.path for entry in found.entries] == ["1"]
    assert list(found.left_out) == ["0"]
    assert "BatchNorm1d" in found.left_out["0"]


@pytest.mark.slow
def test_what_is_written_is_read_again(book: PassportBook, tmp_path: Path) -> None:
    read = PassportBook.read(book.write(tmp_path / "deep" / "passports.json"))
    assert read.to_json() == book.to_json()
    assert [(entry.path, entry.class_name, entry.features) for entry in read.entries] == [
        ("1", "LayerNorm", 8),
        ("3", "RMSNorm", 8),
    ]
    assert [entry.passport.spec for entry in read.entries] == [entry.passport.spec for entry in book.entries]


@pytest.mark.slow
def test_the_digests_of_parameters_survive_the_file(book: PassportBook, tmp_path: Path) -> None:
    read = PassportBook.read(book.write(tmp_path / "passports.json"))
    digests = [entry.passport.parameters["weight"]["sha256"] for entry in read.entries]
    assert all(len(digest) == 64 for digest in digests)
    changed = stack()
    with torch.no_grad():
        changed[1].weight[3] = 2.0
    others = [entry.passport.parameters["weight"]["sha256"] for entry in surveyed(changed).entries]
    assert [digest == other for digest, other in zip(digests, others, strict=True)] == [False, True]


@pytest.mark.slow
def test_the_same_model_gives_the_same_bytes(book: PassportBook, tmp_path: Path) -> None:
    one, two = book.write(tmp_path / "one.json"), surveyed(stack()).write(tmp_path / "two.json")
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.slow
def test_in_a_diff_of_two_files_one_convention_is_one_line(book: PassportBook) -> None:
    other = surveyed(stack(eps=1e-6))
    for entry, changed in zip(book.entries, other.entries, strict=True):
        texts = [json.dumps(each.to_json()["spec"], indent=2).splitlines() for each in (entry, changed)]
        marked = [line for line in difflib.ndiff(*texts) if line[0] in "+-"]
        assert marked == ['-   "eps": 1e-05,', '+   "eps": 1e-06,']


def test_norms_can_be_chosen_by_pattern(book: PassportBook) -> None:
    assert [entry.path for entry in book.only("3").entries] == ["3"]
    assert book.only(None).entries == book.entries
    with pytest.raises(InputError, match=r"stack has no norm at 'nowhere\.\*'; there are 1, 3"):
        book.only("nowhere.*")


def document(book: PassportBook, change: Callable[[Any], object]) -> str:
    values = copy.deepcopy(book.to_json())
    change(values)
    return json.dumps(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(schema_version=2), "expected schema_version 1, got 2"),
        (lambda values: values.pop("content"), "holds no passports of the norms of one model"),
        (lambda values: values.update(sites=[]), '"sites" and "left_out" must be objects'),
        (lambda values: values.update(left_out=None), '"sites" and "left_out" must be objects'),
        (lambda values: values["sites"].update({"1": 5}), "1 is damaged"),
        (lambda values: values["sites"]["3"].update(readings=[]), "3 is damaged"),
        (lambda values: values["sites"]["3"].update(schema_version=9), "3: expected a passport of schema_version"),
        (lambda values: values["sites"]["3"].update(features="many"), "3: features must be a whole number from 1 on"),
        (lambda values: values["sites"]["3"].update(features=0), "3: features must be a whole number from 1 on"),
        (lambda values: values["sites"]["3"].pop("parameters"), "3: a passport has parameters"),
        (lambda values: values["sites"]["3"]["spec"].update(eps="tiny"), "3: eps must be a finite number"),
        (lambda values: values["sites"]["3"].update(verdict="friend"), "3: verdict must be one of"),
    ],
)
def test_a_damaged_or_foreign_document_is_named(
    book: PassportBook, tmp_path: Path, change: Callable[[Any], object], message: str
) -> None:
    path = tmp_path / "passports.json"
    path.write_text(document(book, change))
    with pytest.raises(IdentificationError, match=r"cannot use .*passports\.json as passports") as caught:
        PassportBook.read(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"no json"])
def test_a_file_that_is_no_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "passports.json"
    path.write_bytes(content)
    with pytest.raises(IdentificationError, match=r"expected passports in .*, found no JSON"):
        PassportBook.read(path)


@pytest.mark.parametrize("content", ["[]", "3", "null", '{"model_type": "llama"}'])
def test_json_of_another_kind(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(IdentificationError, match="`normkit identify MODEL` writes such a file"):
        PassportBook.read(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none: No such file"):
        PassportBook.read(tmp_path / "none")
    with pytest.raises(InputError, match=r"cannot read .*Is a directory"):
        PassportBook.read(tmp_path)
