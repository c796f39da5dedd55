import pytest
import torch
from safetensors.torch import load_file

from normkit import demo
from normkit.errors import InputError
from normkit.study.corpus import SEPARATOR


def test_a_twin_has_a_folder_with_a_model():
    files = {"config.json", "model.safetensors", "tokenizer.json", "training.json", "training.jsonl"}
    for name in ("layernorm", "rmsnorm"):
        assert {path.name for path in demo.directory(name).iterdir()} >= files
    with pytest.raises(InputError, match="'layernorm' and 'rmsnorm', got 'batchnorm'"):
        demo.directory("batchnorm")


def test_the_text_is_of_the_promised_size_and_its_functions_compute_what_its_prose_says():
    source = demo.text()
    assert 3000 <= len(source.encode()) <= 6000
    assert SEPARATOR not in source.encode()
    names = {"__name__": "text"}
    exec(source[source.index("import math") :], names)
    normalized = names["layer_norm"]([1.0, 2.0, 3.0, 6.0], eps=0.0)
    # Four features: mean 3, variance 3.5; a few roundings of double precision.
    assert normalized == pytest.approx([value / 3.5**0.5 for value in (-2, -1, 0, 3)], abs=1e-15)
    assert sum(value**2 for value in names["rms_norm"]([1.0, 2.0, 3.0, 6.0], eps=0.0)) == pytest.approx(4)


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return demo.write_twins(tmp_path_factory.mktemp("twins"))


def test_the_healthy_folder_is_the_model_that_ships_and_the_faulty_one_differs_in_one_copied_tensor(twins):
    _, healthy = twins
    shipped = demo.directory("layernorm")
    names = sorted(file.name for file in shipped.iterdir())
    assert sorted(file.name for file in healthy.iterdir()) == names
    assert all((healthy / name).read_bytes() == (shipped / name).read_bytes() for name in names)
    faulty, healthy = (load_file(folder / "model.safetensors") for folder in twins)
    assert faulty.keys() == healthy.keys()
    changed = [name for name in healthy if not torch.equal(faulty[name], healthy[name])]
    assert changed == ["transformer.h.3.ln_1.weight"]
    assert torch.equal(faulty[changed[0]], healthy["transformer.h.2.ln_1.weight"])


def test_a_second_time_the_bytes_are_the_same(twins):
    before = {file: file.read_bytes() for folder in twins for file in folder.iterdir()}
    demo.write_twins(twins[0].parent)
    assert {file: file.read_bytes() for folder in twins for file in folder.iterdir()} == before
