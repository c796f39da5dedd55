from normkit.show.terminal import tail


def test_the_end_of_a_path_is_kept():
    assert tail("model.layers.0.norm", 8) == "….0.norm"
    assert tail("norm", 4) == "norm"
