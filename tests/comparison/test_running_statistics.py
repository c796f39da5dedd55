"""Running statistics of batch norms, in files and in models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from normkit.comparison.comparing import compare
from normkit.comparison.report import describe_comparison
from normkit.comparison.running_statistics import compare_running
from normkit.comparison.values import compare_values
from normkit.comparison.weights import weights_of

MEAN, VARIANCE = "running_mean", "running_var"


def trained(*paths: str, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for path in paths:
        found |= {f"{path}.weight": 0.5 + torch.rand(32, generator=generator)}
        found |= {f"{path}.{MEAN}": torch.randn(32, generator=generator)}
        found |= {f"{path}.{VARIANCE}": 0.2 + torch.rand(32, generator=generator)}
    return found


def changed(fault: str, given: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    mean, variance = given[f"{path}.{MEAN}"], given[f"{path}.{VARIANCE}"]
    made = {
        "none": (mean, variance),
        "lost": (torch.zeros(32), torch.ones(32)),
        "swapped": (variance, mean),
        "mean lost": (torch.zeros(32), variance),
        "variance lost": (mean, torch.ones(32)),
        "deviation": (mean, variance.sqrt()),
        "another": (mean + 0.5, variance),
    }[fault]
    return {**given, f"{path}.{MEAN}": made[0], f"{path}.{VARIANCE}": made[1]}


FAULTS = {
    "none": "equal",
    "lost": "as initialised (mean 0, variance 1): not converted",
    "swapped": "mean and variance are swapped",
    "mean lost": "mean all 0, as initialised: not converted",
    "variance lost": "variance all 1, as initialised: not converted",
    "deviation": "the variance is the reference's standard deviation",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_at_its_norm(fault: str) -> None:
    reference = trained("stem.bn", "body.bn")
    found = compare_running(weights_of(changed(fault, reference, "body.bn")), weights_of(reference))
    assert {each.path: each.words for each in found} == {"stem.bn": "equal", "body.bn": FAULTS[fault]}
    assert [each.is_right for each in found] == [True, fault == "none"]


def test_other_statistics_are_wrong_and_rounded_ones_are_right() -> None:
    reference = trained("bn")
    (found,) = compare_running(weights_of(changed("another", reference, "bn")), weights_of(reference))
    assert found.words.startswith("mean differs by up to ")
    assert not found.is_right
    rounded = {name: value.bfloat16() for name, value in reference.items()}
    assert compare_running(weights_of(rounded), weights_of(reference))[0].is_right
    nearly = {name: value * (1 + 2**-12) for name, value in reference.items()}
    assert not compare_running(weights_of(nearly), weights_of(reference))[0].is_right


def test_other_paths_are_paired_in_turn() -> None:
    reference = trained("a", "b")
    port = {f"net.{name}": value for name, value in changed("lost", reference, "b").items()}
    found = compare_running(weights_of(port), weights_of(reference))
    assert [(each.path, each.reference_path, each.is_right) for each in found] == [
        ("net.a", "a", True),
        ("net.b", "b", False),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "lost", "swapped"])
def test_files_and_models_say_it_first(tmp_path: Path, fault: str) -> None:
    reference = trained("0")
    port = changed(fault, reference, "0")
    for name, tensors in (("port", port), ("reference", reference)):
        save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / f"{name}.safetensors")
    models = []
    for tensors in (port, reference):
        model = nn.Sequential(nn.BatchNorm1d(32)).eval()
        model.load_state_dict({**model.state_dict(), **tensors})
        models.append(model)
    rows = {"input": torch.randn(64, 32, generator=torch.Generator().manual_seed(1))}
    for found in (
        compare(tmp_path / "port.safetensors", tmp_path / "reference.safetensors"),
        compare(models[0], models[1], rows),
    ):
        assert found.differs == (fault != "none")
        facts = [each.value for part in describe_comparison(found).sections for each in part.facts]
        assert f"0: {FAULTS[fault]}" in facts
        if found.differs:
            assert found.causes[0].sentence == f"The running statistics of 0: {FAULTS[fault]}."


# Library -> the names of gain, mean and variance of the norm at a path.
NAMES = {
    "flax.linen": ("params.{}.scale", "batch_stats.{}.mean", "batch_stats.{}.var"),
    "flax.linen, flat": ("params/{}/scale", "batch_stats/{}/mean", "batch_stats/{}/var"),
    "flax.nnx": ("{}.scale", "{}.mean", "{}.var"),
    "haiku": ("{}.scale", "{}/~/mean_ema.average", "{}/~/var_ema.average"),
    "Keras": ("{}/gamma", "{}/moving_mean", "{}/moving_variance"),
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("fault", ["none", "lost", "swapped"])
def test_the_names_of_other_libraries(names: tuple[str, ...], fault: str) -> None:
    reference = trained("stem.bn", "body.bn")
    port = changed(fault, reference, "body.bn")
    ends = ("weight", MEAN, VARIANCE)
    # Other paths, in another order: the gains tell which norm is which.
    held = {
        name.format(ours): port[f"{path}.{end}"]
        for name, end in zip(names, ends, strict=True)
        for path, ours in (("body.bn", "BatchNorm_0"), ("stem.bn", "BatchNorm_1"))
    }
    found = compare_values(weights_of(held), weights_of(reference))
    assert all(each.is_right for each in found.tensors)
    assert {each.reference_path: each.words for each in found.running} == {"stem.bn": "equal", "body.bn": FAULTS[fault]}
    assert found.is_right is (fault == "none")
    assert (found.others.paired, found.others.missing, found.others.extra) == (0, (), ())
