"""`inspect`: a model and some batches in, an `Inspection` out: one measured pass, judged by the rules.

inspecting.py        `inspect`: composes what is below and the measuring engine
result.py            the `Inspection`; facts judged by the rules; the declaration that an inspected model fits
first_text.py        one token on its way through a norm; the keys that a query could select
foldedness.py        how far the weights are from folded and centred
figures.py           the figures over depth
run_figures.py       the figures of a watched run
report/              the words, in a terminal and on a page
"""
