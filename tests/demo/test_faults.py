import pytest
import torch
from safetensors.torch import load_file

from normkit import demo
from normkit.demo.faults import write_twins


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return write_twins(tmp_path_factory.mktemp("twins"))


def test_the_healthy_folder_is_the_model_that_ships(twins):
    _, healthy = twins
    shipped = demo.directory("layernorm")
    names = sorted(file.name for file in shipped.iterdir())
    assert sorted(file.name for file in healthy.iterdir()) == names
    assert all((healthy / name).read_bytes() == (shipped / name).read_bytes() for name in names)


def test_the_faulty_folder_differs_in_one_tensor_which_is_a_copy(twins):
    faulty, healthy = (load_file(folder / "model.safetensors") for folder in twins)
    assert faulty.keys() == healthy.keys()
    changed = [name for name in healthy if not torch.equal(faulty[name], healthy[name])]
    assert changed == ["transformer.h.3.ln_1.weight"]
    assert torch.equal(faulty[changed[0]], healthy["transformer.h.2.ln_1.weight"])


def test_a_second_time_the_bytes_are_the_same(twins):
    before = {file: file.read_bytes() for folder in twins for file in folder.iterdir()}
    write_twins(twins[0].parent)
    assert {file: file.read_bytes() for folder in twins for file in folder.iterdir()} == before
