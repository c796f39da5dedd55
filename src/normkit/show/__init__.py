"""How anything is shown, in a terminal and on a page. Each feature describes its results in its own `report.py`.

parts.py      the vocabulary: Section, Verdict, Fact, Table; strings made safe to print; a NormSpec in a few words
terminal.py   Section -> rich renderables
html.py       a template and its words -> one self-contained page; a NormSpec as MathML
page.html     the frame of all pages; macros.html draws their parts, page.css is their style
embedding.py  data, small drawings and whole pages inside a page
theme.py      the one palette (light and dark) and the settings of every figure
axes.py       new axes, log axes, the axes over depth and over steps, legends
drawing.py    a figure with its title, caption and description; its bytes as a file and as an element of a page
scene.py      three-dimensional things in flat axes
animation.py  the moments of an animation, and its frames as GIF or MP4
grouping.py   rows that say the same of several blocks -> one row
"""
