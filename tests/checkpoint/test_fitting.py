"""What transformers builds from a configuration and weights, and what of them did not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normkit.checkpoint.configuration import read_config
from normkit.checkpoint.fitting import fit
from normkit.errors import ModelError
from tiny_models import tiny


def test_what_does_not_fit_is_told_and_the_rest_is_loaded(tmp_path: Path) -> None:
    model, _ = tiny("bert", tied=False)
    model.save_pretrained(tmp_path)
    weights = dict(model.state_dict())
    del weights["bert.embeddings.LayerNorm.bias"]
    weights["cls.predictions.bias"] = torch.zeros(5)
    found = fit(read_config(tmp_path), {**weights, "surplus": torch.zeros(2)}, tmp_path)
    assert found.asked == type(found.model).__name__ == "BertForMaskedLM"
    assert not found.model.training
    assert found.missing == ["bert.embeddings.LayerNorm.bias"]
    assert found.unexpected == ["surplus"]
    assert found.mismatched == [("cls.predictions.bias", (5,), (97,))]
    kept = found.model.bert.embeddings.LayerNorm.weight
    assert torch.equal(kept, model.bert.embeddings.LayerNorm.weight)


@pytest.mark.slow
def test_the_body_is_taken_where_only_the_head_is_missing(tmp_path: Path) -> None:
    model, _ = tiny("bert", tied=False)
    model.save_pretrained(tmp_path)
    weights = {name: value for name, value in model.state_dict().items() if name.startswith("bert.")}
    found = fit(read_config(tmp_path), weights, tmp_path)
    assert (found.asked, type(found.model).__name__) == ("BertForMaskedLM", "BertModel")
    strict = fit(read_config(tmp_path), weights, tmp_path, or_body=False)
    assert type(strict.model).__name__ == "BertForMaskedLM"
    assert all(name.startswith("cls.") for name in strict.missing)
    del weights["bert.embeddings.LayerNorm.bias"]
    assert type(fit(read_config(tmp_path), weights, tmp_path).model).__name__ == "BertForMaskedLM"


def test_only_a_reader_of_text_where_one_is_wanted(tmp_path: Path) -> None:
    model, _ = tiny("vit")
    model.save_pretrained(tmp_path)
    weights = model.state_dict()
    assert fit(read_config(tmp_path), weights, tmp_path).missing == []
    with pytest.raises(ModelError, match="only models that read text"):
        fit(read_config(tmp_path), weights, tmp_path, text_only=True)
