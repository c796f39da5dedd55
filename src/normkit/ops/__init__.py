"""From a spec and tensors to an implementation.

schemas.py   the operators: schemas and fakes
plans.py     a spec in the terms of the operators, made once
calls.py     which implementation computes a call, and its gradient
counting.py  rows counted by the kernels
"""
