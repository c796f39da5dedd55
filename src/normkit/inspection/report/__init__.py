"""An inspection, and the run that it may have watched, in words: one description, drawn in a terminal and on a page.

    description.py   Inspection -> Report, and the page; inspection.html is its template, page.js sorts its tables
    tables.py        the tables of norms, blocks and attention calls; how far the weights are from folded and centred
    run.py           a watched run: what happened, where it began, the answers, the table of parameters
    printing.py      Inspection -> text for a terminal, or Markdown

Figures come from `normkit.inspection.figures`. Nothing is measured here.
"""
