"""Results in words: one description, drawn as text for a terminal and as one HTML file.

    parts.py        what an inspection's report consists of: Report, Stage, Run ...
    wording.py      what words stand for placements and severities
    sites.py        the table of norms, and the same with alike neighbours folded
    training.py     a watched run: what happened, where it began, the answers, the table of parameters
    description.py  Inspection -> Report: everything the two below say
    text.py         Report -> rich renderables: `summary`, `walk_table`
    html.py         Report -> one self-contained page: `render`, `write`, `frame`
    inspection.html the page's template; page.js: the sorting of its tables

Figures come from `normkit.inspection.figures` and `normkit.study.figures`. Nothing is measured here.
"""
