"""An interpreter that has imported torch and FlashInfer already: tests start ranks by forking it.

    python warm.py serve SOCKET          imports once, then forks a process for each request
    SHIM -u -m MODULE …                  a stand-in for the interpreter, made by `write_shim`: asks the server

Importing is most of what a rank of a small plan does. Everything else stays as it is: the supervisor starts and watches
the ranks, and a forked process gets the environment, arguments and streams of the process that asked.
The one that asked ends as the forked one ends, and when it is ended, so is the other.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys


def write_shim(python, path, place):
    code = f"import runpy, sys\nrunpy.run_path({__file__!r})['ask']({path!r}, sys.argv[1:])\n"
    place.write_text(f"#!{python} -IS\n{code}")
    place.chmod(0o755)
    return place


def ask(path, argv):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # whoever started us is gone: so are we, and the server sees it
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        request = {"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}  # noqa: PTH109 - pathlib imports much
        said = json.dumps(request).encode()
        socket.send_fds(line, [struct.pack("!I", len(said))], [1, 2])
        line.sendall(said)
        status = struct.unpack("!i", line.recv(4))[0]
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler to set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(path):
    import flashinfer.autotuner  # noqa: F401
    import torch.distributed  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            line, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _answer(line)
            line.close()


def _answer(line):
    """Between the server and one forked process: pass its end on, or end it."""
    head, streams, _, _ = socket.recv_fds(line, 4, 2)
    data = b""
    while len(data) < struct.unpack("!I", head)[0]:
        data += line.recv(1 << 20)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        line.close()
        _become(json.loads(data), streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([line, ended], [], [])
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        line.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(request, streams):
    """Be the process that was asked for."""
    import runpy

    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        for number, stream in enumerate(streams, start=1):
            os.dup2(stream, number)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        os.environ["PIPELINE_TUNE_STARTER"] = str(os.getppid())
        sys.path[:0] = [p for p in request["env"]["PYTHONPATH"].split(os.pathsep) if p not in sys.path]
        words = request["argv"][request["argv"].index("-m") + 1 :]
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what the interpreter would print
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[2])
