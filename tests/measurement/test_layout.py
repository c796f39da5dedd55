"""Which streams are counted, and where their numbers lie."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit import specs
from normkit.identification.passport import Passport
from normkit.identification.tracing import trace
from normkit.measurement.block_response import UNKNOWN
from normkit.measurement.instruments import Counts
from normkit.measurement.layout import BlockCall, Layout, MeasuredStep, find_blocks
from normkit.measurement.row_counters import RowCounter, TableReader, Tables, row_tables
from normkit.measurement.sampling import Probe
from normkit.measurement.structure import survey
from normkit.spec import NormSpec

WIDTH, BATCH, TOKENS = 16, 3, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    """Three blocks, with something between them or nothing."""

    def __init__(self, between, order=(0, 1, 2)):
        super().__init__()
        self.blocks, self.between, self.order = nn.ModuleList(Block() for _ in range(3)), between, order

    def forward(self, x):
        for index in self.order:
            x = self.between(self.blocks[index](x))
        return x


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("between", "order", "entered"),
    [
        (lambda x: x, (0, 1, 2), (0,)),
        (lambda x: 2 * x, (0, 1, 2), (0, 1, 2)),
        # The same tensor, with other numbers in it.
        (lambda x: x.mul_(2), (0, 1, 2), (0, 1, 2)),
        # The middle block is given its own output too, and the last one output of three.
        (lambda x: x, (0, 1, 1, 2), (0, 1, 2)),
    ],
)
def test_the_input_of_a_block_is_counted_where_it_is_not_the_output_of_the_one_before(between, order, entered):
    model, x = Stack(between, order), torch.randn(2, 5, 8)
    given: dict[str, list[torch.Tensor]] = {}
    for path, module in model.blocks.named_children():
        module.register_forward_pre_hook(lambda _, args, path=path: given.setdefault(path, []).append(args[0].clone()))
    structure = survey(model, lambda: model(x))
    layout = structure.layout(is_pooled=False)
    assert layout.entered == entered
    given.clear()
    with Probe(model, layout) as probe:
        model(x)
    for block in probe.measured().blocks(structure):
        rows = torch.cat(given[str(block.index)]).double().flatten(0, 1)
        assert block.stream_in.rows == len(rows)
        # float32 sums of eight squares.
        assert block.stream_in.rms_max == pytest.approx(float(rows.square().mean(-1).sqrt().max()), rel=1e-6)


@torch.no_grad()
def test_a_group_of_features_is_a_row():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(-1, (2, 4)), nn.RMSNorm(4)), torch.randn(3, 5, 8)
    layout = survey(model, lambda: model(x)).layout(is_pooled=False)
    assert list(layout.features[:2]) == [4, 4]
    assert layout.dtypes == {"2": (torch.float32, torch.float32)}


MASK = torch.arange(TOKENS) < torch.tensor([[4], [TOKENS], [7]])


def site_of(spec, gain=None):
    """What a layout needs to know of a norm."""
    passport = Passport(verdict="norm", spec=spec, readings={})
    return SimpleNamespace(
        path="0", parent="0", function=None, ordinal=0, module=None, class_name="Norm", spec=spec, gain=gain,
        passport=passport, parameters=lambda: (gain, None),
    )  # fmt: skip


STRUCTURE = SimpleNamespace(roles={}, forward_calls={"0": 1}, sweeps=[UNKNOWN])


def measured(x, spec, *, y=None, gain=None, mask=None):
    """One call of a norm on x; None for no call."""
    y = x if y is None else y
    kinds = (torch.float32,) * 2 if x is None else (x.dtype, y.dtype)
    layout = Layout(sites=(site_of(spec, gain),), blocks=(), dtypes={"0": kinds}, features=(WIDTH, WIDTH))
    tables, features = Tables(layout.tables(), torch.device("cpu")), layout.features
    if x is not None:
        counts = Counts(layout, tables)
        counts.mask, features = mask, counts.features
        counts.before_site(layout.sites[0], x)
        counts.after_site(layout.sites[0], y, None)
    reader = TableReader(step=0, tables=tables.read())
    return MeasuredStep(layout=layout, reader=reader, features=features).sites(STRUCTURE, {})[0]


def statistics(*tensors):
    tables = Tables(row_tables(1), torch.device("cpu"))
    counter = RowCounter(place=0, spec=NormSpec(), enters_norm=False)
    for tensor in tensors:
        counter.add(tables, tensor, None)
    return TableReader(step=0, tables=tables.read()).rows(0, tensors[0].shape[-1])


def test_one_call():
    x, y = torch.randn(2, BATCH, TOKENS, WIDTH)
    found = measured(x, specs.LLAMA, y=y, mask=MASK)
    assert (found.input, found.output) == (statistics(x[MASK]), statistics(y[MASK]))
    assert (found.calls, found.dtype) == (1, "float32")


def test_rows_that_were_flattened():
    x = torch.randn(BATCH, TOKENS, WIDTH)
    assert measured(x.flatten(0, 1), specs.LLAMA, mask=MASK).input == statistics(x[MASK])


def test_before_any_call():
    found = measured(None, specs.LLAMA)
    assert (found.calls, found.dtype, found.input.rows, found.output.rows) == (0, "", 0, 0)
    assert math.isnan(found.attenuation.median)
    assert math.isinf(found.headroom_bits)
    assert found.statistics_headroom_bits is None


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 2.0**128), (torch.float16, 65504.0)])
def test_headroom(dtype, largest):
    x = torch.tensor([[1.0, -4.0], [2.0, 0.0]], dtype=dtype)
    assert measured(x, specs.LLAMA).headroom_bits == pytest.approx(math.log2(largest / 4), abs=1e-6)
    # The output counts too; and it has all the room there is where both are 0.
    assert measured(x, specs.LLAMA, y=2 * x).headroom_bits == pytest.approx(math.log2(largest / 8), abs=1e-6)
    assert measured(0 * x, specs.LLAMA).headroom_bits == math.inf


@pytest.mark.parametrize(
    ("dtype", "spec", "expected"),
    [
        (torch.float16, specs.IMAGEGPT, math.log2(65504) - math.log2(8 * 9)),
        (torch.bfloat16, specs.IMAGEGPT, 128 - math.log2(8 * 9)),
        (torch.float32, specs.IMAGEGPT, None),
        (torch.float16, specs.LLAMA, None),
    ],
)
def test_headroom_of_a_sum_of_squares_in_16_bits(dtype, spec, expected):
    x = torch.tensor([[3.0] * 8, [1.0] * 8], dtype=dtype)
    assert measured(x, spec).statistics_headroom_bits == (
        None if expected is None else pytest.approx(expected, abs=0.01)
    )


def test_channels_are_rows():
    x = torch.randn(BATCH, 6, TOKENS)
    assert measured(x, specs.CONVNEXT, mask=MASK).input == statistics(x.transpose(1, 2)[MASK])


def test_rows_over_all_axes_cannot_be_masked():
    x = torch.randn(BATCH, TOKENS, WIDTH)
    assert measured(x, specs.POOLFORMER).input == statistics(x.flatten(1))
    # Nor where there happen to be as many groups as tokens.
    for spec in (specs.POOLFORMER, specs.POOLFORMER.replace(groups=TOKENS)):
        assert measured(x, spec, mask=MASK).input == measured(x, spec).input


def test_groups_are_rows():
    x = torch.randn(BATCH, TOKENS, WIDTH)
    found = measured(x, specs.LLAMA.replace(groups=4), mask=MASK)
    assert found.input == statistics(x.unflatten(-1, (4, 4))[MASK])


def test_a_gain_before_the_norm_counts_for_the_attenuation_alone():
    x, gain = torch.randn(BATCH, TOKENS, WIDTH), torch.full((WIDTH,), 1e-4, dtype=torch.float64)
    found = measured(x, specs.MUSE_SPARK_INPUT_SCALED.replace(eps=1e-8), gain=gain, mask=MASK)
    assert found.input == statistics(x[MASK])
    # v is about 1e-8, which is eps.
    assert found.attenuation.median == pytest.approx(0.5**0.5, rel=0.1)
    after = measured(x, specs.LLAMA.replace(eps=1e-8), gain=gain)
    assert after.attenuation.median == pytest.approx(1.0, abs=1e-6)


def test_machine_eps_is_that_of_the_input():
    # Rows whose mean square is 2**-52, the machine epsilon of float64.
    tiny = F.rms_norm(torch.randn(100, WIDTH, dtype=torch.float64), (WIDTH,), eps=0.0) * 2.0**-26
    assert measured(tiny, specs.TORCH_RMS_NORM).attenuation.median == pytest.approx(0.5**0.5, rel=0.01)
    assert measured(tiny.float(), specs.TORCH_RMS_NORM).attenuation.median < 1e-3


def test_the_dtype_of_what_leaves():
    x = torch.randn(2, 3, WIDTH).bfloat16()
    found = measured(x, specs.LLAMA, y=x.float())
    assert (found.dtype, found.output_dtype) == ("bfloat16", "float32")
    assert measured(None, specs.LLAMA).output_dtype == ""


def probed(model, spec, *blocks):
    """A probe of the one norm of a model, which is its module "0", and of blocks."""
    site = site_of(spec)
    site.module = model.get_submodule("0")
    layout = Layout(
        sites=(site,),
        blocks=blocks,
        entered=tuple(block.index for block in blocks),
        dtypes={"0": (torch.float32,) * 2},
        features=[0] * (2 + 2 * len(blocks)),
    )
    return Probe(model, layout)


@torch.no_grad()
def test_how_far_outputs_are_off_their_formula():
    class Late(nn.Module):
        """A norm that is wrong for more than one row."""

        def forward(self, x):
            y = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)
            return 2 * y if x.shape[1] == TOKENS else y

    # One rounding or two of float32; and all of the output.
    model, x = nn.Sequential(Late()), torch.randn(BATCH, TOKENS, WIDTH)
    spec = specs.TORCH_RMS_NORM.replace(eps=1e-6, has_weight=False)
    for tokens, least, most in ((TOKENS - 1, 0.0, 4.0), (TOKENS, 0.9 * 2**23, 1.1 * 2**23)):
        with probed(model, spec) as probe:
            probe.batch(None)
            model(x[:, :tokens])
        assert least <= probe.measured().sites(STRUCTURE, {})[0].error < most


@torch.no_grad()
def test_an_input_that_is_overwritten_was_measured_before():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.div_(x.square().mean(-1, keepdim=True).sqrt())

    model = nn.Sequential(InPlace())
    x = 7 * torch.randn(BATCH, TOKENS, WIDTH)
    expected = statistics(x)
    with probed(model, specs.LLAMA) as probe:
        model(x)
    found = probe.measured().sites(STRUCTURE, {})[0]
    assert found.input == expected
    assert found.output.rms_max == pytest.approx(1.0, rel=1e-5)


@torch.no_grad()
def test_one_tensor_may_be_rows_of_two_kinds():
    model, spec = nn.Sequential(nn.Identity()), specs.LLAMA.replace(groups=4)
    block = BlockCall(path="0", index=0, module=model[0])
    x = torch.randn(BATCH, TOKENS, WIDTH)
    with probed(model, spec, block) as probe:
        model(x)
    found = probe.measured().blocks(STRUCTURE)[0]
    assert (found.stream_in, found.stream_out) == (statistics(x), statistics(x))
    assert probe.measured().sites(STRUCTURE, {})[0].input == statistics(x.unflatten(-1, (4, 4)))


class Adding(nn.Module):
    """x + f(x), in a tuple if asked."""

    def __init__(self, width: int = 8, in_tuple: bool = False):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.in_tuple = in_tuple

    def forward(self, x):
        y = x + self.linear(x)
        return (y, None) if self.in_tuple else y


class Experts(nn.Module):
    """A block with a list of two-layer experts inside."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6))

    def forward(self, x):
        return x + sum(expert(x) for expert in self.experts)


class Listed(nn.Module):
    """Modules of some lists, called one after the other."""

    def __init__(self, **lists):
        super().__init__()
        self.names = list(lists)
        for name, members in lists.items():
            setattr(self, name, members if isinstance(members, nn.Module) else nn.ModuleList(members))

    def forward(self, x):
        for name in self.names:
            for member in getattr(self, name):
                x = member(x)
                x = x[0] if isinstance(x, tuple) else x
        return x


def found(model, run=None):
    blocks = find_blocks(model, trace(model, run or (lambda: model(torch.randn(2, 5, 8)))))
    assert all(model.get_submodule(block.path) is block.module for block in blocks)
    return [(block.path, block.index) for block in blocks]


def test_members_of_a_module_list():
    assert found(Listed(layers=[Adding(), Adding(in_tuple=True)])) == [("layers.0", 0), ("layers.1", 1)]


def test_the_order_is_that_of_the_calls():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Adding(), Adding()])

        def forward(self, x):
            return self.layers[0](self.layers[1](x))

    assert found(Backwards()) == [("layers.1", 0), ("layers.0", 1)]


def test_experts_are_inside_their_block():
    assert found(Listed(layers=[Experts(), Experts()])) == [("layers.0", 0), ("layers.1", 1)]


def test_two_lists_share_one_count():
    model = Listed(encoder=[Adding(), Adding()], decoder=[Adding(), Adding(), Adding()])
    assert [path for path, _ in found(model)] == ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2"]
    assert [index for _, index in found(model)] == [0, 1, 2, 3, 4]


def test_a_list_of_one_beside_a_longer_one_is_no_stack():
    assert found(Listed(layers=[Adding(), Adding()], head=[Adding()])) == [("layers.0", 0), ("layers.1", 1)]


def test_one_block_is_a_stack_where_there_is_no_longer_one():
    assert found(Listed(layers=[Adding()])) == [("layers.0", 0)]


def test_layers_without_modules_of_their_own_are_no_blocks():
    assert found(Listed(layers=[nn.Linear(8, 8), nn.Linear(8, 8)], norms=[nn.LayerNorm(8), nn.LayerNorm(8)])) == []


def test_members_of_a_sequential_inside_a_list():
    stages = [nn.Sequential(Adding(), nn.Sequential(nn.Linear(8, 8))), nn.Sequential(Adding(), nn.Linear(8, 16))]
    # The second stage changes the width, so the stages are no blocks; the first stage's members are.
    assert found(Listed(stages=stages)) == [("stages.0.0", 0), ("stages.0.1", 1)]


def test_a_sequential_of_one_class():
    assert found(Listed(blocks=nn.Sequential(Adding(), Adding()))) == [("blocks.0", 0), ("blocks.1", 1)]


def test_a_sequential_of_several_classes_is_a_branch():
    assert found(Listed(head=nn.Sequential(nn.Sequential(nn.Linear(8, 8)), Adding()))) == []


def test_volumes_are_not_a_stream():
    model = Listed(layers=[Adding(), Adding()])
    assert found(model, lambda: model(torch.randn(2, 2, 3, 5, 8))) == []


def test_a_block_called_many_times_is_one_block():
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        vocab_size=32,
        embedding_size=8,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    model = AlbertModel(config).eval()
    path = "encoder.albert_layer_groups.0"
    assert found(model, lambda: model(input_ids=torch.arange(3, 9)[None])) == [(path, 0)]
