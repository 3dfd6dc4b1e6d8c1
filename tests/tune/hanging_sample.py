"""The bench of a GPU without one: which candidate is named when a sample does not end. Run in an interpreter that has
torch; prints for each case what was launched, waited for and said, in order.

    python hanging_sample.py N:ENDED:PART …    sample N (from 0) never ends; the first ENDED had ended when all were
                                               waited for; PART is 1 where a sample is less than a turn around the copies
"""

import json
import sys

import torch

from pipeline.tune.judging import graphs
from pipeline.tune.judging.graphs import GpuBench


class Hung(BaseException):
    """Where the process would stand for ever."""


class Graph:
    def __init__(self, told):
        self.told = told

    def replay(self):
        self.told.append("launched")


class Trying:
    def __init__(self, told):
        self.now = told.append


def case(hangs, ended, part):
    told, made = [], []
    graphs.evict = lambda _: told.append("emptied")
    graphs._woken = lambda _: None

    class Event:
        def __init__(self, enable_timing):
            self.place = len(made) // 2  # a sample has two
            made.append(self)

        def record(self):
            pass

        def query(self):
            return self.place < ended

        def synchronize(self):
            if self.place == hangs:
                raise Hung
            told.append("waited")

    torch.cuda.Event = Event
    bench = GpuBench.__new__(GpuBench)
    bench.both, bench._device, bench._trying = False, None, Trying(told)
    bench.ms, bench._calls, bench._sets, bench._part = [0.5], [4], [None], [bool(part)]
    bench._graphs = {number: [[Graph(told)]] for number in range(2)}
    try:
        bench.rounds([0, 1], 2)
    except Hung:
        told.append("hung")
    return told


print(json.dumps([case(*map(int, words.split(":"))) for words in sys.argv[1:]]))
