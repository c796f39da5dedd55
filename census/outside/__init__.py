"""Faults and healthy oddities of norms, written from the definition of norms and not from normkit's code.

Each case is one function. Its docstring says what is true of the case and where that comes from, its decorator what a
good tool would say first. `run.py` builds each case in a process of its own, shows it to normkit, and records the
answer.
"""
