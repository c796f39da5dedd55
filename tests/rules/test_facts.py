"""Without a config the norms of a model are held against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from faulty_norms import Gain
from normkit.rules.facts import majorities

PATH = "blocks.1.norm_2"


class Twice(Gain):
    """Eps inside the root, and once more outside."""

    def forward(self, x):
        return self.weight * x / ((x.square().mean(-1, keepdim=True) + 1e-2).sqrt() + 1e-2)


class Summed(Gain):
    """The sum of squares in place of their mean."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-2)


class GainTwice(Gain):
    """The caller multiplies by the gain once more."""

    def forward(self, x):
        return self.weight * self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)


class Past(Gain):
    """Statistics of all positions so far."""

    def forward(self, x):
        count = torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True).cumsum(1) / count + 1e-2)


def rms(width):
    return nn.RMSNorm(width, eps=1e-2)


def changed(models, **norms):
    model = models.plain(rms, layers=2)
    for name, norm in norms.items():
        model.set_submodule(name.replace("__", "."), norm(64))
    return models.train(model)


@pytest.mark.parametrize(
    ("norm", "rule", "words"),
    [
        (lambda n: nn.RMSNorm(n, eps=1.0), "A1", "eps is 1, the majority of the norms like it (3) says 0.01"),
        (
            lambda n: nn.LayerNorm(n, eps=1e-2, bias=False),
            "A11",
            "the norms like it (3) says not subtracted",
        ),
        (Summed, "A12", "the sum of squares is not divided (L2), the majority"),
        (GainTwice, "E5", "the gain acts as the square of weight: it is multiplied twice"),
        (Past, "C1", "changing the first position moves later outputs by"),
        (Twice, "E5", "the way it shortens small inputs fits no eps"),
    ],
)
def test_one_norm_that_differs_from_all_others_is_named(models, inspected, norm, rule, words):
    found = inspected(changed(models, blocks__1__norm_2=norm)).findings[0]
    assert (found.rule, found.sites) == (rule, (PATH,))
    assert words in found.evidence[0]


def test_norms_of_two_kinds_are_no_fault(models, inspected):
    other = {"blocks__0__norm_2": nn.LayerNorm, "blocks__1__norm_2": nn.LayerNorm}
    assert [found for found in inspected(changed(models, **other)).findings if found.severity != "note"] == []


def test_only_norms_of_one_role_and_width_are_compared(healthy):
    sites = {site.path: site for site in healthy.sites}
    odd = {path: replace(site, spec=site.spec.replace(eps=1.0)) for path, site in sites.items()}
    assert majorities(sites.values(), (), ()) == {}
    first, final = "transformer.h.0.ln_1", "transformer.ln_f"
    assert set(majorities({**sites, first: odd[first]}.values(), (), ())) == {first}
    assert majorities({**sites, final: odd[final]}.values(), (), ()) == {}
    # One in another list of the same name agrees with it: they are so by design, as the attentions of a UNet's stages.
    beside = replace(odd[first], path="middle.h.0.ln_1")
    assert majorities({**sites, first: odd[first], beside.path: beside}.values(), (), ()) == {}
    # Where something of the others was not decided they tell nothing.
    assert majorities({**sites, first: odd[first]}.values(), (), sites) == {}
