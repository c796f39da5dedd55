"""Synthetic inspections: a healthy model, a faulty one, a hostile one, a long one, an empty one."""

import dataclasses
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import imagined_peri
from normkit import specs
from normkit.inspection.first_text import KeySelection, Walk, WalkStep
from normkit.inspection.foldedness import Foldedness, NormForm, SumForm, WriterForm
from normkit.inspection.inspecting import inspect
from normkit.inspection.result import Inspection
from normkit.measurement.facts import (
    Attention,
    Attenuation,
    Block,
    ModelFacts,
    RowStatistics,
    Site,
    SiteGeometry,
    Spectrum,
)
from normkit.rules.finding import Check, Finding

HOSTILE = (
    "<script>alert(1)</script>\"'><img src=https://evil.example/x onerror=alert(2)>"
    "\x1b[31mred\x1b]0;title\x07\r\n\u202e\ud800{{ 7 * 7 }}[bold]markup[/bold]"
)

CHECKS = (
    ("A1", "eps differs from the config's"),
    ("A2", "eps outside the root"),
    ("A7", "eps lost in the dtype"),
    ("B1", "1 + weight missed"),
    ("B5", "gains re-initialised"),
    ("D1", "residual taken after the norm"),
    ("D3", "no final norm"),
    ("E2", "little headroom"),
    ("F1", "attention logits"),
)


def rows(rms, *, features=64, energy=0.004):
    """Statistics of rows around one rms, a factor 1.6 to either side."""
    low, high = rms / 1.6, rms * 1.6
    return RowStatistics(
        rows=2048,
        features=features,
        rms_min=low * 0.8,
        rms_quantiles=(low, rms, high),
        rms_max=high * 1.3,
        histogram=((math.floor(8 * math.log2(rms)), 2048),),
        zero_rows=0,
        mean_energy=energy,
        angle_to_ones=math.degrees(math.acos(math.sqrt(energy))),
        absmax=high * 4,
        nonfinite=0,
    )


def spectrum(centre, width, *, size=64, outliers=()):
    """Entries around a median."""
    steps = (-2.4, -1.6, -0.67, 0.0, 0.67, 1.6, 2.4)
    quantiles = [centre + width * step for step in steps]
    for _, value in outliers:
        quantiles[0], quantiles[6] = min(quantiles[0], value), max(quantiles[6], value)
    return Spectrum(
        size=size,
        mean=centre,
        quantiles=tuple(quantiles),
        negative=0.0,
        at_initialisation=False,
        nonfinite=0,
        outliers=tuple(outliers),
    )


def geometry(spec, *, turn, features=64):
    """A sample of rows that a norm turns by about so many degrees."""
    low = 0.5 if spec.has_weight else 1.0
    centring = 1.4 if spec.centre_numerator else 0.0
    return SiteGeometry(
        rows=64,
        rotation=(turn * 0.8, turn, turn * 1.5),
        rotation_without_affine=(centring / 2, centring, centring * 2),
        spread_in=1 + turn / 10,
        spread_out=1.15,
        dimension=features - (2 if spec.centre_numerator else 1),
        semi_axes=(low, 1.0, 1.0 + turn / 40),
        vanishing_gains=0,
    )


def site(path, order, *, block, role, rms, spec=specs.TORCH_LAYER_NORM, energy=0.004, gain=None, features=64):
    eps = spec.eps or 2.0**-23
    kept = rms / math.sqrt(rms**2 + eps)
    return Site(
        path=path,
        class_name="LayerNorm" if spec.centre_numerator else "RMSNorm",
        order=order,
        calls=8,
        block=block,
        role=role,
        spec=spec,
        confidence=0.98,
        evidence=("subtracts the mean: f(x + c) = f(x) to 2e-7",),
        input=rows(rms, features=features, energy=energy),
        output=rows(0.9, features=features, energy=0.001),
        attenuation=Attenuation(
            median=kept, smallest=kept - (1 - kept), share_below_99=0.4 if kept < 0.99 else 0.0, share_below_90=0.0
        ),
        gain=spectrum(0.8 + 0.03 * order % 0.5, 0.12) if gain is None else gain,
        bias=spectrum(0.0, 0.05) if spec.has_bias else None,
        dtype="float32",
        headroom_bits=124.0 - math.log2(1 + rms),
        statistics_headroom_bits=None,
        geometry=geometry(spec, turn=8.0 + order % 20, features=features),
    )


def block(path, index, rms_in, rms_out, placement="pre"):
    return Block(
        path=path,
        index=index,
        placement=placement,
        output_slope=1.0 if placement == "pre" else 0.0,
        branch_slope=0.0 if placement == "pre" else 1.0,
        rows_normalized=None if placement == "pre" else True,
        stream_in=rows(rms_in),
        stream_out=rows(rms_out),
    )


def attention(path, index, bound):
    return Attention(
        path=path,
        block=index,
        source="sdpa",
        heads=4,
        head_dim=16,
        bound=bound,
        bounds=(bound, bound * 0.8, bound * 0.7, bound * 0.4),
        sampled_max=bound / 1.9,
        sampled_rows=512,
        entropy=2.6 - 0.1 * index % 1.0,
        entropy_min=1.4 - 0.1 * index % 0.9,
        uniform_entropy=4.08,
    )


def selection(path, index):
    """Keys that the projection hides in part, in the first of four heads most."""
    lowest = 1.0 - index % 4 / 8
    return KeySelection(
        path=path,
        block=index,
        keys=128,
        sampled=16,
        before=1.0,
        key_heads=4,
        heads=((0, lowest), (1, 1.0), (2, 1.0), (3, 1.0)),
    )


def walk(path, spec=specs.TORCH_LAYER_NORM, token=" the"):
    raw = (0.412, -0.733, 0.105, 1.21, -0.288, 0.067, -1.02, 0.554)
    centred = tuple(value - 0.0212 for value in raw)
    scaled = tuple(value * 1.523 for value in centred)
    steps = [
        WalkStep(name="raw", does="the residual stream", mean=0.0212, norm=5.256, norm_over_sqrt_n=0.657,
                 angle_to_ones=88.15, holds="", values=raw),
        WalkStep(name="centred", does="the mean taken from every entry", mean=0.0, norm=5.253, norm_over_sqrt_n=0.6566,
                 angle_to_ones=90.0, holds="mean 0: on the hyperplane orthogonal to all-ones", values=centred),
        WalkStep(name="scaled", does="divided by its standard deviation", mean=0.0, norm=7.9999,
                 norm_over_sqrt_n=0.99999, angle_to_ones=90.0, holds="length sqrt(n): on the sphere", values=scaled),
        WalkStep(name="gain and bias", does="stretched along each axis, then moved", mean=0.014, norm=6.62,
                 norm_over_sqrt_n=0.8275, angle_to_ones=89.03, holds="on the ellipsoid around the bias",
                 values=tuple(0.83 * value + 0.02 for value in scaled)),
    ]  # fmt: skip
    return Walk(path=path, spec=spec, token=token, position=17, features=64, steps=tuple(steps),
                ellipsoid_depth=1.2e-5, plane_defect=3.1e-9, module_error=2.4e-7, relative_error=1.3e-7,
                rounding=2.0**-24)  # fmt: skip


def checks(*found):
    reasons = {"E2": "no 16-bit tensors seen"}
    return tuple(
        Check(
            rule=rule,
            title=title,
            status="finding" if rule in found else "not checked" if rule in reasons else "clean",
            reason=reasons.get(rule, "") if rule not in found else "",
        )
        for rule, title in CHECKS
    )


def facts(name="demo layernorm", **changes):
    ours = ModelFacts(
        name=name,
        class_name="GPT2LMHeadModel",
        architecture="gpt2",
        parameters=331_776,
        dtype="float32",
        width=64,
        source="the demo's own text",
        tokens=2048,
        padding=0,
    )
    return dataclasses.replace(ours, **changes)


def model(name, layers, *, spec=specs.TORCH_LAYER_NORM, width=64):
    """A pre-norm model of 2 * layers + 1 norms."""
    sites, blocks, attentions, selections = [], [], [], []
    for index in range(layers):
        rms = 0.12 * (1 + index) ** 0.8
        path = f"transformer.h.{index}"
        for second, suffix in enumerate(("ln_1", "ln_2")):
            outlier = ((11, 1.9 + 0.02 * index),) if index > 1 and not second else ()
            gain = spectrum(0.72 + 0.04 * index, 0.1 + 0.01 * index, size=width, outliers=outlier)
            sites.append(site(f"{path}.{suffix}", len(sites), block=index, role="pre", rms=rms * (1 + 0.15 * second),
                              spec=spec, energy=0.02 / (1 + index), gain=gain, features=width))  # fmt: skip
        blocks.append(block(path, index, rms, 0.12 * (2 + index) ** 0.8))
        attentions.append(attention(f"{path}.attn", index, 4.0 + 1.5 * index))
        selections.append(selection(f"{path}.attn", index))
    sites.append(site("transformer.ln_f", len(sites), block=None, role="final", rms=0.12 * (1 + layers) ** 0.8,
                      spec=spec, energy=0.003, gain=spectrum(1.4, 0.2, size=width), features=width))  # fmt: skip
    recurring = ((11, tuple(f"transformer.h.{index}.ln_1" for index in range(2, layers))),) if layers > 3 else ()
    return Inspection(
        model=facts(name, width=width),
        sites=tuple(sites),
        blocks=tuple(blocks),
        attentions=tuple(attentions),
        final_norm="transformer.ln_f",
        recurring_outliers=recurring,
        walk=walk("transformer.h.2.ln_1", spec),
        findings=(),
        checks=checks(),
        unrecognised=(),
        selections=tuple(selections),
    )


def foldedness(name, *, reason=""):
    """One norm, one writer, one sum."""
    norm = NormForm(
        path=name, kind="layer", gain_defect=0.3, largest_bias=0.1, readers=(f"{name}.linear",), reason=reason
    )
    writer = WriterForm(name=name, share=0.0, vectors=64, row_mean=1e-9, is_centred=True, reason="")
    other = WriterForm(name=name, share=0.02, vectors=64, row_mean=None, is_centred=False, reason=reason)
    added = SumForm(name=name, width=64, writers=(writer, other), reason=reason)
    return Foldedness(norms=(norm,), sums=(added,), oddly_centred=(name,))


def eps_finding(paths):
    return Finding(
        rule="A1",
        title="eps is not the config's",
        severity="error",
        sites=tuple(paths),
        measured="eps 1e-3 at 3 norms",
        threshold="1e-5, the config's, to 0.1 %",
        source="layer_norm_epsilon of the model's config",
        evidence=tuple(f"{path}: eps 1e-3, shortens the median row by 1.9 %" for path in paths),
        why="Rows come out shorter than the next layer was trained on, most where they are small.",
        remedy=("Set eps to 1e-5 where the norms are built.", "Look for a default that the port did not override."),
        confirm="normkit identify prints eps 1e-5 for these norms.",
    )


def logit_finding():
    return Finding(
        rule="F1",
        title="attention logits above 100",
        severity="warning",
        sites=("transformer.h.5.attn",),
        measured="sampled 214, bound 402",
        threshold="100",
        source="Megatron's default threshold for clipping queries and keys",
        evidence=("transformer.h.5.attn: head 2, bound 402",),
        why="The softmax is one-hot there and passes no gradient; growth from here ends in a loss spike.",
        remedy=("Normalize queries and keys.", "Lower the learning rate or lengthen the warm-up."),
        confirm="The bound stays under 100 over a few hundred steps.",
    )


@pytest.fixture(scope="session")
def healthy():
    return model("demo layernorm", 6)


@pytest.fixture(scope="session")
def tiny():
    """A real model, just large enough to have depth."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return inspect(GPT2LMHeadModel(config).eval(), [{"input_ids": torch.arange(32).view(2, 16)}], name="tiny")


@pytest.fixture
def faulty():
    clean = model("demo layernorm, eps planted", 6)
    attentions = (*clean.attentions[:5], attention("transformer.h.5.attn", 5, 402.0))
    wrong = specs.TORCH_LAYER_NORM.replace(eps=1e-3)
    sites = tuple(
        site(s.path, s.order, block=s.block, role=s.role, rms=s.input.rms_median, spec=wrong) if i < 3 else s
        for i, s in enumerate(clean.sites)
    )
    return dataclasses.replace(
        clean,
        sites=sites,
        attentions=attentions,
        findings=(eps_finding([s.path for s in sites[:3]]), logit_finding()),
        checks=checks("A1", "F1"),
    )


@pytest.fixture
def gauged(healthy):
    """The healthy model, with how far it is from folded."""
    return dataclasses.replace(healthy, foldedness=foldedness("transformer.ln_f", reason="its reader is tied"))


@pytest.fixture
def twelve():
    return model("a model of twelve layers", 12, width=768)


@pytest.fixture
def long():
    return model("a model of a hundred layers", 100)


@pytest.fixture(scope="session")
def peri():
    return imagined_peri.renamed(model("peri", 18, spec=specs.GEMMA))


@pytest.fixture
def hostile():
    """Every string that a model, a tokenizer or a file name can bring is an attack."""
    base = model("x", 1)
    finding = dataclasses.replace(
        eps_finding([HOSTILE]), title=HOSTILE, measured=HOSTILE, why=HOSTILE, remedy=(HOSTILE,), evidence=(HOSTILE,)
    )
    return dataclasses.replace(
        base,
        model=facts(HOSTILE, class_name=HOSTILE, architecture=HOSTILE, dtype=HOSTILE, source=HOSTILE),
        sites=tuple(dataclasses.replace(s, path=HOSTILE + "a" * 400, class_name=HOSTILE) for s in base.sites),
        blocks=tuple(dataclasses.replace(b, path=HOSTILE) for b in base.blocks),
        attentions=tuple(dataclasses.replace(a, path=HOSTILE) for a in base.attentions),
        selections=tuple(dataclasses.replace(s, path=HOSTILE) for s in base.selections),
        final_norm=HOSTILE,
        walk=walk(HOSTILE, token=HOSTILE),
        findings=(finding,),
        checks=(Check(rule="A1", title=HOSTILE, status="not checked", reason=HOSTILE),),
        foldedness=foldedness(HOSTILE, reason=HOSTILE),
        unrecognised=((HOSTILE, HOSTILE),),
    )


@pytest.fixture
def empty():
    """A model without norms, blocks or attention."""
    return Inspection(
        model=facts("a plain network", architecture="", width=0, class_name="Sequential"),
        sites=(),
        blocks=(),
        attentions=(),
        final_norm=None,
        recurring_outliers=(),
        walk=None,
        findings=(),
        checks=tuple(dataclasses.replace(c, status="not checked", reason="no norms") for c in checks()),
        unrecognised=(),
    )
