"""What is made of a GPU that answers so after a failure. Run in an interpreter that has torch and FlashInfer."""

import json
from types import SimpleNamespace

import torch

from pipeline.tune import guard


def answer_all_with(error):
    """From here on every call to CUDA raises `error`, if there is one."""

    def call(*words, **more):
        if error:
            raise error
        return SimpleNamespace(add_=call)

    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = torch.cuda.cudart = torch.ones = call


def survived():
    try:
        guard.survive(ValueError("a tactic"))
    except guard.DeviceLost as lost:
        return f"DeviceLost: {lost}"
    return ""


said = []
for error in (None, torch.cuda.OutOfMemoryError("planted"), RuntimeError("planted")):
    answer_all_with(error)
    said.append(guard.context_lost())
for error in (torch.cuda.OutOfMemoryError("planted"), RuntimeError("planted")):
    answer_all_with(error)
    said.append(survived())
print(json.dumps(said))
