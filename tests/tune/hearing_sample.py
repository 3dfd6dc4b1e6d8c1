"""Hearings of three ranks whose benches and jurors fail at random, as threads: whether they stay in step. Run in an
interpreter that has torch and FlashInfer; ends with an error where they do not, else prints how often what happened.

    python hearing_sample.py HEARINGS
"""

import collections
import json
import pickle
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from pipeline.tune.judging import hearing, rule
from pipeline.tune.judging.bench import Candidate
from pipeline.tune.judging.budget import Budget, Turn
from pipeline.tune.judging.matter import Matter

RANKS, KEYS, CANDIDATES, JURORS = 3, 4, 5, 2
LOCAL = threading.local()  # what chance has in store for the rank of this thread


class Meeting:
    """Gathers as the ranks do, and knows where each one is when it does."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS, timeout=120)
        self.said = [None] * RANKS

    def gather(self, rank, value):
        self.said[rank] = pickle.dumps((sys._getframe(2).f_code.co_name, value))
        self.barrier.wait()
        places, values = zip(*map(pickle.loads, self.said), strict=True)
        self.barrier.wait()
        assert len(set(places)) == 1, f"ranks meet at different places: {places}"
        return list(values)


class Jury:
    """Jurors that answer, decline a key, or are lost."""

    def __init__(self):
        self.jurors = dict.fromkeys(range(1, JURORS + 1))
        self.declined = []

    def sit(self, number, keys, count, tick):
        assert keys
        for key, _, _ in keys:
            assert (number, key) not in self.declined, "asked again"
        if LOCAL.chance.random() < LOCAL.lost:
            return [], "no answer"
        answers = [
            ([], "declined", LOCAL.chance.randrange(len(candidates)))
            if LOCAL.chance.random() < LOCAL.declines
            else (times(range(len(candidates)), count), "", 0)
            for _, candidates, _ in keys
        ]
        self.declined += [(number, key) for (key, _, _), (_, why, _) in zip(keys, answers, strict=True) if why]
        return answers, ""

    def dismiss(self, number, why):
        del self.jurors[number]


def times(candidates, count):
    return [{c: (LOCAL.chance.gauss(-0.02 * c, 0.02),) for c in candidates} for _ in range(count)]


def bench(points, candidates, device, told, bucket, *, copies):
    if LOCAL.chance.random() < LOCAL.fails:
        raise MemoryError("planted")
    failed = {1: "planted"} if len(candidates) > 1 and LOCAL.chance.random() < LOCAL.fails else {}
    return SimpleNamespace(failed=failed)


def rounds(trials, count, *, quick=False):
    time.sleep(LOCAL.slow)
    return [times(alive, count) for _, alive in trials]


def one_rank(rank, seed, meeting):
    """What a rank's hearing finds of each key."""
    same, LOCAL.chance = random.Random(seed), random.Random(f"{seed} {rank}")
    LOCAL.fails, LOCAL.declines = same.choice((0, 0.02)), same.choice((0, 0.1, 0.5))
    LOCAL.lost, LOCAL.slow = same.choice((0, 0, 0.1)), same.choice((0, 0, 0.001))
    runner = SimpleNamespace(runners=[object()], custom_op="op", lookup=SimpleNamespace(profile=[]))
    candidates = [Candidate(0, tactic) for tactic in range(-1, CANDIDATES - 1)]
    matters = [Matter((0, 1 << key, 0), [runner], candidates) for key in range(KEYS)]
    steps = SimpleNamespace(now=SimpleNamespace(rank=rank), attempt=lambda attempt: None)
    budget = Budget(LOCAL.chance.choice((0.002, 10.0)) if LOCAL.slow else 10.0, KEYS)

    def gather(value):
        return meeting.gather(rank, value)

    try:
        turn = Turn(time.monotonic())
        hearing.Hearing(steps, torch.device("cpu"), budget, gather, matters, turn, Jury()).hold(lambda said: None)
    except BaseException:
        meeting.barrier.abort()
        raise
    return [{**vars(matter), "points": None} for matter in matters]


def what_happened(matters):
    """Of the keys of one hearing; an error where one has ended for no reason."""
    for matter in matters:
        found = [name for name in ("error", "stopped", "clear", "short") if matter[name]]
        assert found or len(matter["sittings"]) == rule.MOST_SITTINGS, matter
        assert len(matter["seats"]) == len(matter["sittings"])
        assert not {*matter["failed"]} & {*matter["running"]} and 0 in matter["running"]
        assert not any({*matter["failed"]} & {*one} for sitting in matter["sittings"] for one in sitting)
        yield from found or ["all sittings"]
        yield from ["a juror declined"] if matter["without"] else []
    who = {why.split(":")[0] for matter in matters for why in matter["without"].values()}
    yield from ["jurors of different ranks declined"] if len(who) > 1 else []
    yield from ["all jurors declined a key"] if any(len(matter["without"]) == JURORS for matter in matters) else []


hearing.bench, hearing.rounds = bench, rounds
counts = collections.Counter()
with ThreadPoolExecutor(RANKS) as threads:
    for seed in range(int(sys.argv[1])):
        ranks = [threads.submit(one_rank, rank, seed, meeting) for meeting in [Meeting()] for rank in range(RANKS)]
        first, *others = [rank.result() for rank in ranks]
        assert all(other == first for other in others), "ranks found different things"
        counts.update(what_happened(first))
print(json.dumps(counts))
