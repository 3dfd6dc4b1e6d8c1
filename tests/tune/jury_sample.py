"""A rank's jurors with stand-ins for their processes: what becomes of one that is lost. Run in an interpreter that has
torch and FlashInfer; prints for each case what sittings gave, the notes, and how often a juror was started.

    python jury_sample.py DIR      the stand-ins are made there
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from pipeline.tune.judging.bench import DEFAULT, Candidate
from pipeline.tune.judging.court import judge_op
from pipeline.tune.judging.jury import Jury, convened

# Answers as the case says for this start of it: it hangs, ends at once, leaves a candidate out, adds a key or a time,
# says why it has no rounds, or does as it should.
STAND_IN = f"""#!{sys.executable} -IS
import json, os, sys, time
with open(os.environ["STARTS"], "a+") as starts:
    starts.write("x")
    starts.seek(0)
    how = os.environ["CASE"].split()[len(starts.read()) - 1]
if how == "ends":
    os._exit(1)
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    if "release" in line:
        print(json.dumps({{"release": True}}), flush=True)
    elif how == "hangs":
        time.sleep(600)
    elif how == "mumbles":
        print(json.dumps({{"heard": [{{"rounds": [[[0.0]]]}}]}}), flush=True)
    elif how == "babbles":
        print(json.dumps({{"heard": [{{"rounds": [[[0.0], [1.0]]]}}, 5]}}), flush=True)
    elif how == "stutters":
        print(json.dumps({{"heard": [{{"rounds": [[[0.0], [1.0, 1.0]]]}}]}}), flush=True)
    elif how == "declines":
        print(json.dumps({{"heard": [{{"error": "no memory"}}]}}), flush=True)
    else:
        print(json.dumps({{"heard": [{{"rounds": [[[0.0], [1.0]]]}}]}}), flush=True)
"""


def next_op(jury):
    """Judge an op that has nothing to judge."""
    op = SimpleNamespace(name="wide", buckets=())
    steps = SimpleNamespace(tick=lambda said: None)
    session = SimpleNamespace(
        options=SimpleNamespace(judge="on"), device=torch.device("cpu"), jury=jury, ranks=SimpleNamespace(steps=steps),
        budget=SimpleNamespace(), plan=SimpleNamespace(ops=[op]),
    )  # fmt: skip
    judge_op(session, op, None, (), None)


def case(words, place):
    os.environ.update(CASE=words, STARTS=str(place / words.replace(" ", "-")))
    sittings = []
    with convened(1, place / "plan.json", torch.device("cpu"), 3.0) as jury:
        missing = jury.ready(lambda said: None)
        for number, why in missing.items():
            jury.dismiss(number, why, for_good=True)
        for _ in range(3):
            next_op(jury)
            if 1 not in jury.jurors:
                sittings.append("none")
                continue
            told, why = jury.sit(1, [((0, 8, 0), [DEFAULT, Candidate(0, 1)], 1)], 1, lambda said: None)
            sittings.append(why or told)
            if why:
                jury.dismiss(1, f"on rank 0: {why}")
    return {"sittings": sittings, "notes": jury.notes, "starts": len(Path(os.environ["STARTS"]).read_text())}


def bounds_of_a_release():
    """Until when it waits for jurors that do not answer: how many different moments."""
    until = []

    def wait_until(deadline, seconds, tick):
        until.append(deadline)
        return {"error": "no answer"}

    def deaf(number):
        process = SimpleNamespace(kill=lambda: None)
        return SimpleNamespace(used=True, ask=lambda request: None, wait_until=wait_until, process=process)

    jury = Jury(jurors={number: deaf(number) for number in (1, 2, 3)})
    jury.release(lambda said: None)
    assert len(until) == 3
    assert not jury.jurors
    return len(set(until))


place = Path(sys.argv[1])
stand_in = place / "juror"
stand_in.write_text(STAND_IN)
stand_in.chmod(0o755)
sys.executable = str(stand_in)
cases = (
    "works",
    "declines",
    "hangs works",
    "mumbles works",
    "babbles works",
    "stutters works",
    "hangs hangs works",
    "hangs ends works",
    "ends works",
)
told = {words: case(words, place) for words in cases}
print(json.dumps({**told, "bounds of a release": bounds_of_a_release()}))
