"""The published claims about normalization, rerun with numbers on any machine.

A study is one file of `experiments`: claim, source, arms, fixed data, budget, numeric condition, charts. `running`
takes it through its arms and seeds, `judging` gives the verdicts.

    transformer.py      Transformer: one model, any norm at any place
    perceptron.py       MLP: the same for rows
    recurrent.py convolutional.py                 a recurrent net, a net for images
    norms.py hyperplane_norm.py                   what stands where a model normalizes
    initialisation.py   initial weights that arms share

    corpus.py windows.py                          the source of Python's standard library, as batches
    digits.py tasks.py                            scikit-learn's digits; tasks of known least loss

    loop.py             the one training loop
    keeping.py          a run on the disk
    ranks.py            a run in several processes
    probing.py          what `inspect` says of a trained model
    laboratory.py       what an arm is measured with

    propagation.py growth.py landscape.py tangency.py turning.py    what is measured of models
    curves.py speed.py                                              and of runs

    result.py           arms, conditions, claims, studies, verdicts
    statistics.py       medians, bootstrap intervals, slopes
    judging.py          from measurements to verdicts
    chart.py            what a study shows, as data

    catalogue.py        the studies by name
    settings.py         a budget's settings, and what changes them
    place.py            device, dtype, threads, processes
    running.py          a study taken through its arms and seeds
    trial.py            one arm with one seed
    workers.py          who measures: this process, or several beside it
    store.py            the folder of a study
    document.py         its result as JSON
    experiments/        the studies

Public names are resolved on first use, so that listing the studies loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normkit.study.catalogue import NAMES, load
    from normkit.study.perceptron import MLP, MLPConfig
    from normkit.study.running import run
    from normkit.study.transformer import PLACEMENTS, Transformer, TransformerConfig

_HOME = {
    "MLP": "perceptron",
    "MLPConfig": "perceptron",
    "NAMES": "catalogue",
    "PLACEMENTS": "transformer",
    "Transformer": "transformer",
    "TransformerConfig": "transformer",
    "load": "catalogue",
    "run": "running",
}

__all__ = ["MLP", "NAMES", "PLACEMENTS", "MLPConfig", "Transformer", "TransformerConfig", "load", "run"]


def __getattr__(name: str) -> object:
    """Import the home of a public name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'normkit.study' has no attribute {name!r}")
    value = getattr(import_module(f"normkit.study.{_HOME[name]}"), name)
    globals()[name] = value
    return value
