"""Stand-ins for CUDA, so that candidates are timed the way of a GPU on a CPU: a graph is a list of calls, an event the
time of day. `stand_in` puts them into `pipeline.tune.compare.timing`.
"""

import contextlib
import time
import types

_captured = []


class Event:
    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def query(self):
        return False

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return (later.at - self.at) * 1e3


class Graph:
    def __init__(self):
        self.calls = []

    def replay(self):
        for call in self.calls:
            call()


@contextlib.contextmanager
def _capture(graph, pool):
    _captured.append(graph)
    yield
    _captured.pop()


def kernel(call):
    """Run a call, and keep it in the graph that is being captured."""
    if _captured:
        _captured[-1].calls.append(call)
    call()


CUDA = types.SimpleNamespace(
    Event=Event,
    CUDAGraph=Graph,
    graph=_capture,
    synchronize=lambda device=None: None,
    graph_pool_handle=lambda: (0, 0),
    get_device_properties=lambda device: types.SimpleNamespace(L2_cache_size=1 << 20, total_memory=1 << 40),
)


def stand_in(timing, run=None):
    real = timing.run
    timing.cuda, timing.on_gpu = CUDA, lambda device: True
    timing.clock.BOTH_FROM, timing.clock.SETTLE, timing._WAKE = 1, 5.0, 0.0
    timing.RotatingBuffers._count = lambda buffers, size: 4
    timing.run = run or (lambda point, inputs, one: kernel(lambda: real(point, inputs, one)))
