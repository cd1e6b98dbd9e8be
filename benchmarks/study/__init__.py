"""The queue of the studies: named rows of settings, each trained with some seeds.

`plan.py` reads a study, `pool.py` trains what is missing, `record.py` makes the line of a finished
run, and `table.py` makes tables and curves of the lines.
"""
