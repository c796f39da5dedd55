"""The published claims about normalization, rerun with numbers on any machine.

A study is a file of `experiments`: arms, claims with numeric conditions fixed in advance, data, budget and charts.
`running` measures its arms with each seed, `result` decides its claims.

    result.py chart.py          a study and its verdicts; its charts as data
    catalogue.py statistics.py  the studies by name, and their settings; statistics over seeds, arms and losses

    transformer.py small_nets.py  models with any norm at any place
    model_parts.py                their norms and initial weights
    corpus.py digits.py           data: the source of Python's standard library, a Markov chain; scikit-learn's digits
    propagation.py                activations, gradients and steps of a model

    training_run.py run_checkpoint.py ranks.py  a run and its loop; a run that is continued; one in several processes
    arm_context.py workers.py                   the context in which an arm is measured; its runs and their processes
    running.py store.py                         a whole study; its folder
    report.py figures.py                        how a result is told; how its charts are drawn
    experiments/                                the studies

Public names are resolved on first use, so that listing the studies does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normkit.study.catalogue import NAMES, load
    from normkit.study.running import run
    from normkit.study.small_nets import MLP, MLPConfig
    from normkit.study.transformer import PLACEMENTS, Transformer, TransformerConfig

_HOME = {
    "MLP": "small_nets",
    "MLPConfig": "small_nets",
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
