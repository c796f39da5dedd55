"""Norms that are written out in a forward: seen by what they do to rows, and said by D7."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit import inspect
from normkit.measurement.effects import Effects
from normkit.measurement.layout import BlockCall


def root_mean_square(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def deviation(x):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def in_place(x):
    return x.clone().div_(x.norm(dim=-1, keepdim=True))


def unit(x):
    return F.normalize(x, dim=-1)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(64, 64)
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(64))

    def forward(self, x):
        return x + self.linear(self.norm(x) * self.gain)


class Model(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.blocks = nn.Embedding(99, 64), nn.ModuleList(Block(norm) for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


IDS = torch.randint(0, 99, (2, 24), generator=torch.Generator().manual_seed(0))
WRITTEN = {
    root_mean_square: ("mul", "one rms 1"),
    deviation: ("div", "one rms 0.9922, without a mean"),
    in_place: ("div", "one length 1"),
    unit: ("normalize", "one length 1"),
}


@pytest.mark.parametrize("norm", WRITTEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_is_no_module_is_told(norm, dtype):
    """There was no site, nothing in `unrecognised`, and every rule was clean."""
    function, words = WRITTEN[norm]
    inspection = inspect(Model(norm).to(dtype), {"ids": IDS})
    assert inspection.sites == ()
    paths = tuple(f"blocks.{index}:{function}" for index in range(2))
    assert tuple(path for path, _ in inspection.unrecognised) == paths
    (found,) = [each for each in inspection.findings if each.rule == "D7"]
    assert (found.severity, found.sites) == ("note", paths)
    if dtype == torch.float32:
        assert words in found.evidence[0]


@pytest.mark.parametrize("norm", [torch.rms_norm, torch.layer_norm])
def test_the_functions_of_torch_itself_are_norms(norm):
    """Only those of `torch.nn.functional` were."""
    inspection = inspect(Model(lambda x: norm(x, (64,))), {"ids": IDS})
    assert [site.path for site in inspection.sites] == [f"blocks.{index}:{norm.__name__}" for index in range(2)]
    assert [block.placement for block in inspection.blocks] == ["pre", "pre"]


class Signs(nn.Module):
    def forward(self, x):
        # No product and no quotient.
        return torch.sign(x)


def test_a_block_that_forgets_scale_without_any_norm_is_told():
    inspection = inspect(Model(Signs()), {"ids": IDS})
    (found,) = [each for each in inspection.findings if each.rule == "D7"]
    assert found.sites == ("blocks.0", "blocks.1")
    assert "no norm was found in it" in found.evidence[0]


class Bounded(nn.Module):
    def forward(self, x):
        return torch.tanh(0.5 * x)


def test_what_is_bounded_and_follows_short_rows_is_no_norm():
    assert [each for each in inspect(Model(Bounded()), {"ids": IDS}).findings if each.rule == "D7"] == []


class Kept(nn.Module):
    """Divides by the scale of the first call, as a cache does that nobody clears."""

    def __init__(self):
        super().__init__()
        self.scales = {}

    def forward(self, x):
        scale = self.scales.setdefault(x.shape, torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
        return x * scale


def test_a_scale_that_is_kept_from_call_to_call():
    inspection = inspect(Model(Kept()), {"ids": IDS})
    found = inspection.findings[0]
    assert (found.rule, found.severity, found.sites) == ("D6", "error", ("blocks.0.norm",))
    assert "it keeps the scale of an earlier call" in found.evidence[0]


class Scaled(nn.Module):
    """What multiplies and divides and is no norm: a weight's own length, a mask, rotations, a number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.norm = nn.RMSNorm(64)

    def forward(self, x):
        x = x @ F.normalize(self.weight, dim=-1) * 0.3
        x = self.norm(x)
        angles = torch.arange(x.shape[1])[:, None] * torch.logspace(0, -3, 32)
        cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        x = x * cosine + torch.cat((-x[..., 32:], x[..., :32]), -1) * sine
        return x * (x.mean(-1, keepdim=True) > -10) / 8.0


def test_what_is_no_norm_is_not_told():
    model = Model(Scaled())
    products = Effects(["blocks.0.norm.norm", "blocks.1.norm.norm"])
    with products.watching(model):
        model(IDS)
    assert products.handwritten(model, lambda: model(IDS)) == ()
    # Outside a norm that was found the same division is told: the paths of norms are what keeps it out.
    assert len(model._forward_hooks) == 0


WIDTH = 16


class Adapted(nn.Module):
    """A matrix with an addition of low rank that starts at zero."""

    def __init__(self):
        super().__init__()
        self.matrix, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return self.matrix(x) + self.up(self.down(x))


class Reading(nn.Module):
    def __init__(self, is_read):
        super().__init__()
        self.norm, self.closing, self.branch, self.is_read = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            Adapted(),
            is_read,
        )

    def forward(self, x):
        y = self.norm(x)
        assert y.shape == x.shape
        return self.closing(x + self.branch(y if self.is_read else x))


def idle(is_read=True, change=lambda _block: None):
    torch.manual_seed(0)
    block = Reading(is_read).eval()
    change(block)
    x = torch.randn(2, 4, WIDTH)
    model = nn.Sequential(block)
    idle = Effects(["0.norm", "0.closing"])
    with torch.no_grad(), idle.watching(model):
        output = model(x)
    blocks = [BlockCall(path="0", index=0, module=block)]
    return idle.unread(model, output, lambda: model(x)), idle.constant(blocks)


def test_what_is_read_and_what_is_returned_is_used():
    assert idle() == ((), ())


def test_a_norm_that_nothing_reads_though_its_shape_is_looked_at():
    assert idle(is_read=False) == (("0.norm",), ())


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_a_branch_that_is_one_vector(bias):
    def kill(block):
        nn.init.zeros_(block.branch.matrix.weight)
        nn.init.constant_(block.branch.matrix.bias, bias)

    # A part that adds nothing to a branch that works is no branch: an adapter starts so.
    assert idle(change=kill) == ((), ("0.branch",))


def test_a_row_that_differs_is_no_constant():
    def keep(block):
        block.branch.matrix.weight.data.mul_(1e-3)
        nn.init.constant_(block.branch.matrix.bias, 1.0)

    assert idle(change=keep)[1] == ()


class Attending(nn.Module):
    """A block whose branch attends to other rows, in a module of its own."""

    def __init__(self):
        super().__init__()
        self.branch = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x, keys):
        return x + self.branch(x, keys, keys, need_weights=False)[0]


def test_an_attention_over_one_key_is_no_branch_that_ignores_its_input():
    torch.manual_seed(0)
    block = Attending().eval()
    model, x = nn.ModuleList([block]), torch.randn(2, 4, WIDTH)
    effects = Effects([])
    with torch.no_grad(), effects.watching(model):
        block(x, torch.randn(2, 1, WIDTH)[:1].expand(2, 1, WIDTH))
    blocks = [BlockCall(path="0", index=0, module=block)]
    assert effects.constant(blocks) == ()
