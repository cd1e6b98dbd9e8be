"""The stability league: LipsFormer beside the methods that people would use instead of it.

`bodies.py` lists the methods, each written from its paper in a file of its own. `cell.py` trains
one cell of the league: a body with an optimizer, a learning rate, a warmup and a seed. `plan.py`
decides which cells are run in which order. `results.py`, `table.py` and `plots.py` read the cells.
"""
