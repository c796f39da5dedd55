"""A result -> Matplotlib figures, one function a figure; what draws computes nothing.

Matplotlib is imported when a figure is drawn, never when this package is.

    theme.py       the one palette (light and dark), the settings of every figure, SVG for a page
    numerals.py    numbers and percentages as text
    drawing.py     Drawing: a figure with its title, caption and description
    depth.py       the axis over sites and blocks, log axes, legends, what a figure needs
    inspection.py  input scale, mean direction; `drawings`: all figures of an inspection
    gains.py       gain spectrum
    attention.py   attention logits, attention entropy
"""
