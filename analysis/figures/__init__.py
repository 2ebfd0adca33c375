"""Figures, one file each: ``data(...)`` returns exactly what is drawn, ``draw(data)`` draws it.

Readable in greyscale and without colour vision: lightness-ordered colour maps, and every distinction also carried by
text, marker, hatch or line style. The same data give the same bytes.
"""
