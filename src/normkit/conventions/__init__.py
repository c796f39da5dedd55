"""The conventions of a norm, one file per kind. A `NormSpec` holds one value of each.

Each value is an object that knows its formula, its derivative, its words, its LaTeX and MathML, and the kernels' code
for it. Nothing else in the package decides by a convention's name. No file here loads torch when it is imported.
"""
