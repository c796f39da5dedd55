"""The kernels of a GPU, in Triton; only `loading` is imported where there is none.

loading.py        whether they can be used, and for which tensors
program.py        conventions and dtypes -> the compile-time arguments of a kernel
configuration.py  how rows are divided among programs
planning.py       tensors -> where the rows are -> launches
launching.py      a launch, eager or traced by torch.compile
delegation.py     long rows that torch's own kernel computes
operators.py      the operators
rows.py           device functions that forward and backward share
forward.py        kernels
backward.py       kernels
"""
