"""Which candidate is named when a sample on a GPU does not end. Run in an interpreter that has torch and FlashInfer;
prints for each case what was launched, waited for and said, in order.

    python hanging_sample.py N:ENDED …    sample N (from 0) never ends; the first ENDED had ended when all were waited for
"""

import json
import sys

from pipeline.tune.compare import clock, timing


class Hung(BaseException):
    """Where the process would stand for ever."""


def case(hangs, ended):
    told, made = [], []
    timing.evict = lambda _: told.append("emptied")

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

    timing.cuda.Event = Event
    bench = timing.GpuBench.__new__(timing.GpuBench)
    point = type("Point", (), {"inputs": [], "runners": [None]})
    bench.points, bench.candidates, bench.tell = (
        [point],
        {number: timing.Candidate(0, tactic) for number, tactic in enumerate((-1, 0))},
        told.append,
    )
    bench.ms, bench._calls, bench._sets, bench._device = [0.5], [4], [None], None
    bench._samples = {number: [[lambda: told.append("launched")]] for number in range(2)}
    try:
        clock.time_rounds([bench], [[0, 1]], 2, both=False)
    except Hung:
        told.append("hung")
    return told


print(json.dumps([case(*map(int, words.split(":"))) for words in sys.argv[1:]]))
