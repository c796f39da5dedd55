"""From behaviour to a spec.

tracing.py     one forward pass written down: which module and which function was called, in order
behaviour.py   `identify`: a module or function, called on probe inputs -> Passport
sites.py       every norm of a model, in forward order: the only finder of norms
"""
