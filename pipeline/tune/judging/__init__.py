"""Judging a choice: the leading tactics and the default timed side by side until it is clear which to bake.

rule.py      decides, from times alone
bench.py     what times: a bench, and the one of a CPU, by the wall clock
graphs.py    the bench of a GPU: CUDA graphs and cold weights
power.py     at rest and under load: the states of the clock in which a GPU's rounds are timed
benches.py   which bench a device has
jury.py      processes beside the rank in which sittings are held, and juror.py what runs in them
hearing.py   the sittings of one key, on all ranks that hold the op
court.py     both together, on all ranks that hold the op, with one outcome
budget.py    how long that may take
"""
