"""From a spec and tensors to an implementation.

schemas.py   the operators: schemas and fakes
plans.py     a spec as the operators take it, made once
calls.py     which implementation computes a call, and its gradient
devices.py   the operators on a GPU
checking.py  the self-check of the kernels of a GPU
counting.py  rows counted by the kernels
"""
