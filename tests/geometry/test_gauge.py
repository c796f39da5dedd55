from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from helpers import assert_close, normal
from normkit.errors import DtypeError
from normkit.geometry import centred_defect, reader_defect, weightless_defect


@pytest.mark.slow
@given(out=st.integers(1, 6), features=st.integers(1, 6), seed=st.integers(0, 2**16), scale=st.floats(0.01, 100))
def test_a_share_is_what_a_projection_onto_ones_keeps_whatever_the_size(out, features, seed, scale):
    weight, one = normal(out, features, seed=seed), torch.ones(())
    onto_ones = torch.ones(out, out, dtype=torch.float64) / out
    share = (onto_ones @ weight).square().sum() / weight.square().sum()
    assert_close(centred_defect(weight), share, length=6, terms=one)
    assert_close(reader_defect(weight.T), share, length=6, terms=one)
    assert_close(centred_defect(scale * weight), share, units=32, length=6, terms=one)


def test_the_share_written_is_that_of_inputs_without_a_preferred_direction():
    weight = normal(8, 5) + 0.3
    written = normal(20_000, 5, seed=1) @ weight.T
    along = 8 * written.mean(1).square().sum() / written.square().sum()
    assert float(along) == pytest.approx(float(centred_defect(weight)), rel=0.05)


def test_centring_a_writer_or_a_reader_brings_its_share_to_zero():
    weight = normal(6, 9) + 1
    assert float(centred_defect(weight)) > 0.1
    assert float(centred_defect(weight - weight.mean(0))) < 1e-30
    assert float(reader_defect(weight - weight.mean(1, keepdim=True))) < 1e-30


def test_constants_alone_are_one_nothing_is_zero_and_a_random_matrix_has_one_nth():
    assert float(centred_defect(torch.ones(4, 1) * torch.tensor([1.0, -2.0]))) == pytest.approx(1)
    assert float(reader_defect(torch.ones(3, 4))) == pytest.approx(1)
    assert centred_defect(torch.zeros(2, 4, 3)).tolist() == [0, 0]
    assert float(centred_defect(normal(64, 5000))) == pytest.approx(1 / 64, rel=0.1)
    assert float(reader_defect(normal(5000, 64))) == pytest.approx(1 / 64, rel=0.1)
    # The gain counts by its distance from 1.
    gain = normal(3, 16)
    assert_close(weightless_defect(gain), (gain - 1).square().mean(-1).sqrt())
    assert float(weightless_defect(torch.ones(7))) == 0


@pytest.mark.parametrize(
    ("defect", "size"), [(centred_defect, (4, 3)), (reader_defect, (4, 3)), (weightless_defect, (4,))]
)
def test_gradients_vmap_and_dtypes(defect, size):
    batch = normal(3, *size)
    assert_close(torch.vmap(defect)(batch), defect(batch))
    assert torch.autograd.gradcheck(defect, (batch.requires_grad_(),))
    assert defect(batch.float()).dtype == torch.float32
    for start in (torch.zeros(size), torch.ones(size)):
        gradient = torch.func.grad(lambda value: defect(value))(start.double())
        assert gradient.isfinite().all()
    with pytest.raises(DtypeError, match="floating"):
        defect(torch.ones(size, dtype=torch.long))


def test_training_left_the_shipped_layer_norm_model_nearly_centred(demo_directories):
    model = AutoModelForCausalLM.from_pretrained(demo_directories["layernorm"]).double().requires_grad_(False)
    blocks = model.transformer.h
    # Conv1D holds (in, out). A random matrix would have 1 in these units.
    written = [64 * float(centred_defect(m.weight.T)) for b in blocks for m in (b.attn.c_proj, b.mlp.c_proj)]
    read = [
        64 * float(reader_defect(linear.weight.T * norm.weight))
        for block in blocks
        for linear, norm in ((block.attn.c_attn, block.ln_1), (block.mlp.c_fc, block.ln_2))
    ]
    assert 0.01 < min(written) < max(written) < 0.1
    assert 0.1 < min(read) < max(read) < 0.3
    assert 0.4 < 64 * float(centred_defect(model.transformer.wte.weight.T)) < 0.6
    assert all(0.05 < float(weightless_defect(norm.weight)) < 0.5 for b in blocks for norm in (b.ln_1, b.ln_2))
