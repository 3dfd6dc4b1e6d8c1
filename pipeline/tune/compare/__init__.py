"""Comparing FlashInfer's fastest tactics with the default, side by side, before one is kept.

decide.py    decides, from times alone
timing.py    takes the times: CUDA graphs with cold weights, or calls on a CPU
clock.py     at rest and under load: the states of the clock in which a GPU's rounds are timed
second.py    a second process that times the same entries
compare.py   all together, on all ranks that hold an op
"""
