"""What can compute a spec fast; everything else computes `reference.py`.

support.py  which norms any of them computes
cpu.py    the compiled library: found, loaded once, its instruction set chosen; which norms it can compute
csrc/     its C++, built by setup.py: it only registers implementations of the operators that ops.py defines
triton/   the same on a GPU
"""
