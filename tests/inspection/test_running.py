import pytest
from torch import nn

from normkit.inspection.running import vocabulary
from normkit.study import Transformer, TransformerConfig


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
