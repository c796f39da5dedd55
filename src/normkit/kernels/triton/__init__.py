"""The kernels of a GPU, in Triton; only `loading` is imported where there is none.

loading.py        whether they can be used, and for which tensors
program.py        conventions and dtypes -> what a kernel is compiled for
layout.py         where rows lie
configuration.py  how rows are cut into pieces
planning.py       tensors -> launches
launching.py      a launch at once, or for torch.compile to see
operators.py      the operators
rows.py           device functions that forward and backward share
forward.py        kernels
backward.py       kernels
"""
