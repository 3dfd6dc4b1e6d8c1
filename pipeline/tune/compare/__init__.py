"""Comparing FlashInfer's fastest tactics with the default, side by side, before one is kept.

decide.py    decides, from times alone
timing.py    takes the times: CUDA graphs with cold weights, or calls on a CPU
clock.py     at rest and under load: the states of the clock in which a GPU's rounds are timed
workers.py   processes beside the rank that time the same entries
entries.py   which entry answers where
compare.py   all together, on all ranks that hold an op
"""
