import collections

import numpy as np
import pytest
import torch
from torch import nn

from normkit import inspect
from normkit.errors import InputError
from normkit.measurement.running import arguments, first_tokens, fitted, rows, runner, token_ids, token_mask, vocabulary
from normkit.study import Transformer, TransformerConfig


@pytest.mark.slow
def test_a_model_of_transformers_tells_how_many_tokens_it_embeds(stock):
    assert vocabulary(stock) == stock.config.vocab_size == 256


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (Transformer(TransformerConfig(vocabulary=37, context=8, width=16, layers=1)), 37),
        (nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 5)), None),
        (nn.Sequential(nn.Linear(8, 5)), None),
    ],
)
def test_of_another_the_outputs_of_the_last_layer_do_where_some_embedding_has_as_many_entries(model, size):
    assert vocabulary(model) == size


class Taking(nn.Module):
    """A model that takes one argument of each kind."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 8), nn.LayerNorm(8)

    def forward(self, ids, options=None, scale=1.0, mode="plain", is_extra=None):
        bias = 0.0 if options is None else options["inner"]["bias"].unsqueeze(1)
        assert mode in ("plain", "other")
        assert is_extra in (None, True)
        return self.norm(self.embedding(ids) * scale + bias)


class Anything(nn.Module):
    """A model whose arguments have no names."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, *args):
        return self.norm(args[0]) + args[1]


IDS = torch.arange(12).reshape(2, 6)
NESTED = {"inner": {"bias": torch.randn(2, 8, generator=torch.Generator().manual_seed(0))}}
Pair = collections.namedtuple("Pair", ["ids", "options"])
BATCHES = {
    "a tensor": IDS,
    "a tuple": (IDS, NESTED, 2.0),
    "a named tuple": Pair(IDS, NESTED),
    "a dictionary with floats, strings, flags and None": {
        "ids": IDS,
        "scale": 0.5,
        "mode": "other",
        "options": None,
        "is_extra": True,
    },
    "nested dictionaries": {"ids": IDS, "options": NESTED},
    "a list of tensors, each a batch": [IDS, IDS + 1],
    "a list of lists, as a DataLoader gives": [[IDS, NESTED], [IDS, NESTED]],
    "a tuple of dictionaries, each a batch": ({"ids": IDS}, {"ids": IDS}),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_every_kind_are_inspected(kind):
    """Tuples, tensors, floats, strings and nested dictionaries once ended in an AttributeError."""
    inspection = inspect(Taking(), BATCHES[kind])
    assert [site.path for site in inspection.sites] == ["norm"]
    assert inspection.sites[0].input.rows == inspection.model.tokens
    assert inspection.model.tokens == 12 * inspection.sites[0].calls
    assert inspection.model.distinct in (12, 13)


@pytest.mark.slow
def test_arguments_without_names():
    x = torch.randn(3, 5, 8)
    assert inspect(Anything(), (x, x)).sites[0].input.rows == 15
    assert inspect(Anything(), [[x, x], [x, x]]).sites[0].calls == 2


class Unknown:
    pass


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ids": IDS, "options": {"inner": Unknown()}}, r"options\['inner'\] is .*Unknown"),
        ((IDS, np.zeros(3)), "argument 1 is numpy.ndarray"),
        ("a text", "got str"),
        (7, "got int"),
        ([7], "got int"),
        (["a text"], "got str"),
        ({"mode": "plain"}, "holds none"),
        ([], "at least one batch"),
        ((IDS,) * 6, "cannot be called with 6 positional arguments"),
    ],
)
def test_what_cannot_be_taken_is_one_line(given, words):
    with pytest.raises(InputError, match=words) as caught:
        inspect(Taking(), given)
    assert "\n" not in str(caught.value)


def test_parts_of_a_batch():
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1] * 6])
    batch = arguments(Taking(), (IDS, {"attention_mask": mask, "lengths": torch.tensor([2, 6])}, 0.5))
    assert [*batch] == ["ids", "options", "scale"]
    assert torch.equal(token_mask(batch), mask.bool())
    assert token_ids(batch) is batch["ids"]
    second = rows(batch, 1)
    assert (second["ids"].tolist(), second["options"]["lengths"].tolist()) == ([IDS[1].tolist()], [6])
    assert bool(first_tokens(batch)["options"]["attention_mask"].all())
    assert runner(Anything(), {0: IDS.float()[:, None].expand(-1, 8, -1).mT, 1: 1.0})().shape == (2, 6, 8)


def test_one_tensor_goes_first_in_a_model_that_has_another_name_for_it():
    """A class of transformers took timm's `x` among its keywords, and had no image then."""

    class Seeing(nn.Module):
        def forward(self, pixel_values=None, **options):
            return options.get("pixels", pixel_values)

    image = torch.randn(2, 3, 4, 4)
    assert [*fitted(Seeing(), {"x": image})] == [0]
    assert runner(Seeing(), fitted(Seeing(), {"x": image}))() is image
    assert [*fitted(Seeing(), {"pixel_values": image})] == ["pixel_values"]
    assert [*fitted(Seeing(), {"x": image, "scale": 2.0})] == ["x", "scale"]
