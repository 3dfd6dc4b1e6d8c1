"""The entry point: what it picks, what it says, and that CMD gets its process untouched.

NVML is a real shared library here, compiled from a few lines of C that answer from environment variables.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cache_samples as samples
import pytest

from pipeline.cache.pick import Baked, HostInfo, choose, keys_below, read_baked
from pipeline.contract.manifest import RankFacts
from pipeline.contract.places import CACHE_FILE, CODE_ROOT, MANIFEST_FILE
from pipeline.contract.record import Host, Record
from pipeline.image.contexts import Destination, Staging
from pipeline.start import check, nvml, workspace

ROOT = Path(__file__).resolve().parents[2]
# As it lies in an image: the package beside it is found by nobody else.
STAGED = Staging(Path(tempfile.mkdtemp(prefix="start-"))).code(Destination(CODE_ROOT))
ENTRY = STAGED / CODE_ROOT.lstrip("/") / "bin" / "pipeline-run"

# FAKE_GPUS: one GPU per ';', each `name|uuid` and then `|name|uuid` per MIG slice. FAKE_STATUS: what init answers.
FAKE = r"""
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
static char *part(int gpu, int field) {
    const char *text = getenv("FAKE_GPUS"); if (!text) return NULL;
    static char copy[4096]; char *save1, *save2, *one, *two; strncpy(copy, text, 4095);
    for (one = strtok_r(copy, ";", &save1); one; one = strtok_r(NULL, ";", &save1), gpu--) if (gpu == 0) {
        for (two = strtok_r(one, "|", &save2); two; two = strtok_r(NULL, "|", &save2), field--)
            if (field == 0) return two;
        return NULL;
    }
    return NULL;
}
int nvmlInit_v2(void) { const char *s = getenv("FAKE_STATUS"); return s ? atoi(s) : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { for (*n = 0; part(*n, 0); ++*n); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(uintptr_t)(i * 100 + 1); return 0; }
static int text(void *h, char *out, unsigned size, int field) {
    uintptr_t v = (uintptr_t)h - 1; char *s = part(v / 100, (v % 100) * 2 + field);
    if (!s) return 2; strncpy(out, s, size); return 0;
}
int nvmlDeviceGetName(void *h, char *out, unsigned size) { return text(h, out, size, 0); }
int nvmlDeviceGetUUID(void *h, char *out, unsigned size) { return text(h, out, size, 1); }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { strncpy(out, "580.95.05", size); return 0; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *then) {
    *now = *then = part(((uintptr_t)h - 1) / 100, 2) != NULL; return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { *n = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned i, void **out) {
    *out = (void *)((uintptr_t)h + 1 + i); return part(((uintptr_t)h - 1) / 100, (1 + i) * 2) ? 0 : 6;
}
"""
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
TWO = f"{H200}|GPU-aaaa-1;{H200}|GPU-bbbb-2"
SLICED = f"{H200}|GPU-aaaa-1|{H200} MIG 1g.18gb|MIG-cccc|{H200} MIG 2g.35gb|MIG-dddd;{H100}|GPU-bbbb-2"


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory):
    place = tmp_path_factory.mktemp("nvml")
    (place / "fake.c").write_text(FAKE)
    command = ["cc", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "fake.c"]
    try:
        subprocess.run(command, cwd=place, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no C compiler here")
    return place


def start(*command, env=None, fake=None, gpus="", **more):
    base = {"PATH": os.environ["PATH"], "HOME": "/tmp", **(env or {})}
    if fake is not None:
        base |= {"LD_LIBRARY_PATH": str(fake), "FAKE_GPUS": gpus}
    return subprocess.run(
        [sys.executable, "-IS", ENTRY, *command], env=base, capture_output=True, text=True, check=False, **more
    )


def gpus_of(fake, gpus, asked=None):
    code = (
        "import json, os; from pipeline.start.nvml import *; g = read_gpus(os.environ['LIB'])\n"
        "print(json.dumps([[d.name, d.uuid, d.mig] for d in visible(g, os.environ)] + [g.driver]))"
    )
    env = {"LIB": str(fake / "libnvidia-ml.so.1"), "FAKE_GPUS": gpus}
    if asked is not None:
        env["CUDA_VISIBLE_DEVICES"] = asked
    out = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(out.stdout)


@pytest.mark.parametrize(
    ("gpus", "asked", "names"),
    [
        (TWO, None, [H200, H200]),
        (TWO, "", []),
        (TWO, "1", [H200]),
        (f"{H200}|GPU-a;{H100}|GPU-b", "1,0", [H100, H200]),
        (f"{H200}|GPU-a;{H100}|GPU-b", " 1 , 0 ", [H100, H200]),
        (TWO, "0,5,1", [H200]),  # ends at the first that is none
        (TWO, "-1", []),
        (TWO, "0,0", []),  # twice is an error to CUDA
        (TWO, "NoDevFiles", []),
        (TWO, "99999999999999999999", []),
        (f"{H200}|GPU-aaaa-1;{H100}|GPU-bbbb-2", "GPU-bbbb", [H100]),
        (f"{H200}|GPU-aaaa-1;{H100}|GPU-aabb-2", "GPU-aa", []),  # not unique
        (SLICED, None, [f"{H200} MIG 1g.18gb", H100]),
        (SLICED, "0", [f"{H200} MIG 1g.18gb"]),
        (SLICED, "MIG-dddd", [f"{H200} MIG 2g.35gb"]),
        (SLICED, "MIG-", []),
        ("", None, []),
    ],
)
def test_devices_are_seen_as_cuda_shows_them(fake_nvml, gpus, asked, names):
    *found, driver = gpus_of(fake_nvml, gpus, asked)
    assert [name for name, _, _ in found] == names
    assert [mig for _, _, mig in found] == ["MIG" in name for name in names]
    assert driver == "580.95.05"


def test_silent_nvml_is_said(fake_nvml, tmp_path):
    with pytest.raises(nvml.NoNvml, match="is not here"):
        nvml.read_gpus(str(tmp_path / "none.so"))
    samples.write(tmp_path, H200)
    env = {"PIPELINE_AUTOTUNE_CACHE_DIR": str(tmp_path), "FAKE_STATUS": "9"}
    done = start("true", env=env, fake=fake_nvml, gpus=TWO)
    assert "no GPU is visible here (nvmlInit_v2 ended with NVML status 9)" in done.stderr


def test_the_fitting_key_is_picked_and_exported(fake_nvml, tmp_path):
    path = samples.write(tmp_path, H200)
    samples.write(tmp_path, H100)
    env = {"PIPELINE_AUTOTUNE_CACHE_DIR": str(tmp_path)}
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    done = start(sys.executable, "-c", code, env=env, fake=fake_nvml, gpus=TWO)
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"tuned cache: 3 entries for {H200} (")
    assert "NVML" in done.stderr
    seen = json.loads(done.stdout)
    assert seen["PIPELINE_TUNED_CACHE"] == str(path / CACHE_FILE)
    assert seen["PIPELINE_AUTOTUNE_CACHE_DIR"] == str(tmp_path)


@pytest.mark.parametrize(
    ("gpus", "more", "why"),
    [
        (f"{H100}|GPU-a", {}, f"tuned for {H200}, here {H100}"),
        (TWO, {"CUDA_VISIBLE_DEVICES": ""}, f"tuned for {H200}, no GPU is visible here"),
        (f"{H200}|GPU-a;{H100}|GPU-b", {}, f"tuned for {H200}, here {H100}"),
        (SLICED, {"CUDA_VISIBLE_DEVICES": "0"}, f"tuned for {H200}, here {H200} MIG 1g.18gb"),
        (TWO, {"PIPELINE_TUNED_KEY": "ffff"}, "no baked key is ffff"),
    ],
)
def test_a_miss_is_said_and_cmd_runs_unless_it_is_required(fake_nvml, tmp_path, gpus, more, why):
    samples.write(tmp_path, H200)
    env = {"PIPELINE_AUTOTUNE_CACHE_DIR": str(tmp_path), **more}
    done = start("echo", "ran", env=env, fake=fake_nvml, gpus=gpus)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert f"tuned cache: not used: {why}" in done.stderr
    done = start("echo", "ran", env={**env, "PIPELINE_REQUIRE_TUNED": "1"}, fake=fake_nvml, gpus=gpus)
    assert (done.returncode, done.stdout) == (7, "")
    assert why in done.stderr and "hint: " in done.stderr
    done = start("echo", "ran", env={**env, "PIPELINE_REQUIRE_TUNED": "0"}, fake=fake_nvml, gpus=gpus)
    assert done.returncode == 0


def test_a_stale_export_does_not_survive_a_miss(tmp_path):
    env = {"PIPELINE_AUTOTUNE_CACHE_DIR": str(tmp_path), "PIPELINE_TUNED_CACHE": "/old"}
    assert start("sh", "-c", "echo [$PIPELINE_TUNED_CACHE]", env=env).stdout == "[]\n"


def here_record():
    return Record(samples.CPU, "cpu-x86_64", Host(cpu=check.read_cpu()))


def test_a_cpu_key_is_compared_by_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "record", lambda gpu="": here_record())
    samples.write(tmp_path)
    env = {"PIPELINE_AUTOTUNE_CACHE_DIR": str(tmp_path)}
    done = start("true", env=env)
    assert done.stderr.startswith(f"tuned cache: 3 entries for {check.read_cpu()['model']}")
    assert "NVML" not in done.stderr
    if len(os.sched_getaffinity(0)) > 1:
        one = min(os.sched_getaffinity(0))
        done = start("true", env=env, preexec_fn=lambda: os.sched_setaffinity(0, {one}))
        assert "tuned for threads" in done.stderr and "here 1" in done.stderr


def test_several_fitting_keys_are_not_guessed():
    def baked(key, gpus, ranks):
        return Baked(f"0.6/90a/{key * 64}", "/nowhere", gpus=gpus, ranks=ranks)

    two, four, other = baked("a", (H200,) * 2, 2), baked("b", (H200,) * 4, 4), baked("c", (H200,) * 2, 2)
    assert choose([two, four], HostInfo((H200,) * 4))[0] is four
    assert choose([two, four], HostInfo((H200,) * 2))[0] is two
    found, why = choose([two, four, other], HostInfo((H200,) * 2))
    assert found is None and "PIPELINE_TUNED_KEY" in why
    assert choose([two, other], HostInfo((H200,) * 2), "c")[0] is other
    assert choose([two, other], HostInfo((H200,) * 2), other.key)[0] is other


def altered(place, old, new):
    text = (place / MANIFEST_FILE).read_text()
    assert old in text
    (place / MANIFEST_FILE).write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: (p / MANIFEST_FILE).unlink(),
        lambda p: (p / MANIFEST_FILE).write_bytes(b"\xff"),
        lambda p: (p / MANIFEST_FILE).write_text("{"),
        lambda p: (p / MANIFEST_FILE).write_text("[" * 100_000),
        lambda p: (p / MANIFEST_FILE).write_text('{"key": 3}'),
        lambda p: [(p / MANIFEST_FILE).unlink(), os.mkfifo(p / MANIFEST_FILE)],
        lambda p: [(p / MANIFEST_FILE).unlink(), (p / MANIFEST_FILE).symlink_to("/dev/zero")],
        lambda p: altered(p, '"schema": 1', '"schema": 2'),
        lambda p: altered(p, '"size": ', '"size": 1e999, "was": '),
        lambda p: (p / CACHE_FILE).unlink(),
        lambda p: (p / CACHE_FILE).write_text("{}"),
        lambda p: p.rename(p.with_name("0" * 64)),
        lambda p: (p / MANIFEST_FILE).write_text((p / MANIFEST_FILE).read_text().replace('"gpus"', '"g\\u001b"')),
    ],
)
def test_a_damaged_key_is_never_used_and_never_a_traceback(fake_nvml, tmp_path, damage):
    damage(samples.write(tmp_path, H200))
    env = {"PIPELINE_AUTOTUNE_CACHE_DIR": str(tmp_path)}
    done = start("echo", "ran", env=env, fake=fake_nvml, gpus=TWO, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "tuned cache: not used: its " in done.stderr and "Traceback" not in done.stderr


def test_a_damaged_key_hides_no_sound_one(fake_nvml, tmp_path):
    altered(samples.write(tmp_path, H100), '"size": ', '"size": 1e999, "was": ')
    samples.write(tmp_path, H200)
    env = {"PIPELINE_AUTOTUNE_CACHE_DIR": str(tmp_path)}
    done = start("true", env=env, fake=fake_nvml, gpus=TWO)
    assert "tuned cache: 3 entries for NVIDIA H200 " in done.stderr


def test_links_are_not_taken_for_keys(tmp_path):
    path = samples.write(tmp_path / "real", H200)
    (tmp_path / "root" / "0.6.16.post3").mkdir(parents=True)
    (tmp_path / "root" / "0.6.16.post3" / "90a").symlink_to(path.parent)
    assert keys_below(str(tmp_path / "root")) == []
    assert keys_below(str(tmp_path / "none")) == []


def test_both_spellings_of_a_manifest_are_read_alike(tmp_path):
    path = samples.write(tmp_path, H200)
    key = keys_below(str(tmp_path))[0]
    text = (path / MANIFEST_FILE).read_text()
    compact, indented = json.dumps(json.loads(text)), json.dumps(json.loads(text), indent=2)
    seen = []
    for spelled in (compact, indented):
        (path / MANIFEST_FILE).write_text(spelled)
        one = read_baked(str(tmp_path), key)
        seen.append((one.broken, one.gpus, one.ranks, one.entries, one.options))
    assert seen[0] == seen[1] == ("", (H200, H200), 2, 3, {})


def test_a_manifest_without_ranks_is_damaged(tmp_path):
    samples.write(tmp_path, H200, ranks=())
    assert read_baked(str(tmp_path), keys_below(str(tmp_path))[0]).broken == "its manifest is damaged"


def test_entries_with_owners_are_counted_with_those_that_stand_twice(tmp_path):
    """Each rank holds one of three answers alone, under two keys; the rows name the first key of each."""
    owners = {samples.entry_key(8): (1,), "its second key": (1,), samples.entry_key(64): (0,), "another": (0,)}
    ranks = tuple(RankFacts(r, "host", "cuda:0", H200, "", 4, 1.0) for r in range(2))  # 4 of 6 each
    samples.write(tmp_path, H200, owners=owners, ranks=ranks)
    assert read_baked(str(tmp_path), keys_below(str(tmp_path))[0]).entries == 6


@pytest.mark.parametrize("code", [0, 3, 7, 255])
def test_the_exit_code_is_cmds_own(code):
    assert start("sh", "-c", f"exit {code}").returncode == code


def test_cmd_keeps_process_signals_stdin_and_arguments(tmp_path):
    script = (
        "import os, signal, sys, json\n"
        "print(json.dumps([os.getpid(), sys.argv[1:], sys.stdin.read(),"
        " open('/proc/self/status').read().split('SigIgn:')[1].split()[0]]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-IS", ENTRY, "sh", "-c", "exec \"$0\" -IS -c \"$1\" 'a b' '' '--x'", sys.executable, script],
        env={"PATH": os.environ["PATH"], "HOME": "/tmp"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    out, _ = process.communicate("in")
    pid, words, text, _ = json.loads(out)
    assert (pid, words, text) == (process.pid, ["a b", "", "--x"], "in")
    # What is ignored is what was ignored before: a job in the background hands some signals on so.
    words = ["sh", "-c", "grep SigIgn /proc/self/status"]
    plain = subprocess.run(words, capture_output=True, text=True, check=True, restore_signals=True)
    assert start(*words).stdout == plain.stdout


def test_a_signal_ends_cmd_itself():
    process = subprocess.Popen([sys.executable, "-IS", ENTRY, "sleep", "600"], stderr=subprocess.DEVNULL)
    while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


def test_the_environment_is_handed_on_as_it_was():
    env = {"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONPATH": "/nowhere", "PYTHONHOME": "/no", "ODD": "a\nb"}
    done = start("env", "-0", env=env)
    assert dict(line.split("=", 1) for line in done.stdout.split("\0") if line) == env
    assert "Traceback" not in done.stderr


def test_what_cannot_be_run_is_answered_as_a_shell_does(tmp_path):
    (tmp_path / "plain").write_text("x")
    assert start("no-such-program").returncode == 127
    assert start(str(tmp_path / "plain")).returncode == 126
    done = start()
    assert done.returncode == 2 and "hint: " in done.stderr
    for case in (start("no-such-program"), done):
        assert "Traceback" not in case.stderr


def test_a_closed_stderr_is_no_reason_to_fail():
    done = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" -IS "{ENTRY}" echo ran 2>&-'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ran\n")


def test_a_workspace_is_found_where_the_home_is_not_writable(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    assert workspace.workspace({"HOME": str(home)}) == ("", "")
    assert workspace.workspace({"FLASHINFER_WORKSPACE_BASE": str(home)}) == ("", "")
    monkeypatch.setattr(workspace, "_TEMPORARY", (str(tmp_path),))
    made, _ = workspace.workspace({"HOME": "/dev/null/none"})
    assert made == str(tmp_path / f"flashinfer-{os.getuid()}")
    assert Path(made).stat().st_mode & 0o777 == 0o700
    assert workspace.workspace({"HOME": "/dev/null/none"})[0] == made
    base, said = workspace.workspace({"FLASHINFER_WORKSPACE_BASE": "/dev/null/none"})
    assert base == "" and "not writable" in said
    monkeypatch.setattr(workspace, "_TEMPORARY", ())
    assert "no directory is writable" in workspace.workspace({"HOME": "/dev/null/none"})[1]


def test_a_planted_workspace_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "_TEMPORARY", (str(tmp_path),))
    planted = tmp_path / f"flashinfer-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    made, _ = workspace.workspace({"HOME": "/dev/null/none"})
    assert made == f"{planted}-{os.getpid()}"
    planted.rmdir()
    Path(made).rmdir()
    planted.symlink_to("/etc")
    assert workspace.workspace({"HOME": "/dev/null/none"})[0] == f"{planted}-{os.getpid()}"


def test_a_start_imports_nothing_heavy():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import pipeline.start.__main__, pipeline.start.nvml\n"
        "print(sorted({'argparse', 'subprocess', 'docker', 'torch'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-IS", "-c", code, str(ROOT)], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


COMMAND = ("vllm", "serve", "/models/x", "--tensor-parallel-size", "2")
