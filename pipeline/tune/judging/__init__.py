"""Judging a choice: the leading tactics and the default timed side by side until it is clear which to bake.

rule.py      decides, from times alone
bench.py     times: CUDA graphs and cold weights on a GPU, the wall clock on a CPU
hearing.py   the sittings of one key, on all ranks that hold the op
court.py     both together, on all ranks that hold the op, with one outcome
budget.py    how long that may take
"""
