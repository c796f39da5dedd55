"""`inspect`: a model and some batches in, an `Inspection` out: one measured pass, judged by the rules.

result.py             the `Inspection`: frozen values with JSON out
key_selectability.py  which keys of an attention some query could prefer to all others
walk.py               one token's vector through one norm, stage by stage
loss.py               the loss of the next token
foldedness.py         how far the weights are from folded and centred
build_inspection.py   measured facts judged by the rules; the declaration that an inspected model fits
inspecting.py         `inspect`: composes all of the above
"""
