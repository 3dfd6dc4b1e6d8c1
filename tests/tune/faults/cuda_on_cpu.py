"""Stand-ins for CUDA, so that judging goes the way of a GPU on a CPU: a graph is a list of calls, an event the time of
day. `CHANGES` says what becomes of the modules of `pipeline.tune.judging` once they are imported.
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


def _properties(device):
    return types.SimpleNamespace(L2_cache_size=1 << 20, total_memory=1 << 40)


CUDA = types.SimpleNamespace(
    Event=Event,
    CUDAGraph=Graph,
    graph=_capture,
    synchronize=lambda device=None: None,
    graph_pool_handle=lambda: (0, 0),
    get_device_properties=_properties,
)


def _with_cuda(module):
    kept = ("amax", "zeros", "float32", "uint8", "int8", "Tensor", "device")
    module.torch = types.SimpleNamespace(cuda=CUDA, **{name: getattr(module.torch, name) for name in kept})


def _cold(module):
    def still(point):
        moving = module._moving(point)
        return [n for n, one in enumerate(point.inputs) if hasattr(one, "data_ptr") and n not in moving]

    _with_cuda(module)
    module._still, module.Copies._count = still, lambda copies, size: 4


def _graphs(module):
    real = module.run

    def run(point, inputs, candidate):
        if _captured:
            _captured[-1].calls.append(lambda: real(point, inputs, candidate))
        real(point, inputs, candidate)

    _with_cuda(module)
    module.run = run
    module.calls = lambda ms, copies, points=1: 2  # fewer than copies: the cache is emptied


def _benches(module):
    def bench(points, candidates, device, trying, bucket, *, copies=None):
        return module.GpuBench(points, candidates, device, trying, copies or module.Copies(device), both=True)

    module.bench, module.copies_for = bench, module.Copies
    module.together = lambda device, buckets: [buckets]


CHANGES = {"cold": _cold, "graphs": _graphs, "benches": _benches}
