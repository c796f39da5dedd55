import pytest
import torch

from normkit.errors import InputError
from normkit.study.place import Place, require_device
from normkit.study.ranks import Ranks


def test_a_place_in_words_has_no_time_and_no_path():
    words = Place(dtype=torch.bfloat16, threads=3).in_words()
    assert words.keys() == {"normkit", "torch", "python", "device", "cpu", "dtype", "threads"}
    assert (words["device"], words["dtype"], words["threads"]) == ("cpu", "bfloat16", "3")
    assert words["torch"] == torch.__version__


def test_several_processes_are_said():
    assert Place(ranks=Ranks(rank=1, size=4)).in_words()["processes"] == "4"


@pytest.mark.parametrize("device", ["warp", "cuda:99", "", "cpu:x"])
def test_a_device_that_is_not_here_is_refused_in_a_line(device):
    with pytest.raises(InputError) as refused:
        require_device(device)
    assert str(refused.value).startswith(f"cannot compute on the device {device!r}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "meta"])
def test_a_device_that_is_here_is_not(device):
    require_device(device)
