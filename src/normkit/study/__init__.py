"""The published claims about normalization, rerun with numbers on any machine.

A study is one file of `experiments`: claim, source, arms, fixed data, budget, numeric condition, charts. `running`
takes it through its arms and seeds, `judging` gives the verdicts.

    transformer.py      Transformer: one model, any norm at any place
    norms.py            what stands where a model normalizes
    initialisation.py   initial weights that arms share

    corpus.py           the text: the source of Python's standard library
    windows.py          that text as batches, and the loss on it

    loop.py             the one training loop
    laboratory.py       what an arm is measured with
    result.py           arms, conditions, claims, studies, verdicts
    statistics.py       medians, bootstrap intervals, slopes
    judging.py          from measurements to verdicts
    chart.py            what a study shows, as data
    catalogue.py        the studies by name
    experiments/        the studies
"""

from normkit.study.transformer import PLACEMENTS, Transformer, TransformerConfig

__all__ = ["PLACEMENTS", "Transformer", "TransformerConfig"]
