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
    settings.py         a budget's settings, and what changes them
    place.py            device, dtype, threads, processes

    running.py          a study taken through its arms and seeds
    trial.py            one arm with one seed
    workers.py          who measures: this process, or several beside it
    store.py            the folder of a study
    document.py         its result as JSON

    experiments/        the studies
"""

from normkit.study.transformer import PLACEMENTS, Transformer, TransformerConfig

__all__ = ["PLACEMENTS", "Transformer", "TransformerConfig"]
