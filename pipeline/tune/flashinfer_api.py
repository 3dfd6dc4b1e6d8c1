"""Every name of FlashInfer that the tuner touches beyond its documented API, in one place.

`load` checks them all at start, so that a FlashInfer that moved one of them fails with its name before anything is
tuned, and not in the middle. Works with 0.6.16.post3 and 0.7.4; what only newer versions have is asked for with
`getattr` and listed in `NEWER`.
"""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from pipeline.contract.errors import WarmUpError

from .agreement import Held
from .strategies import check_version

MODULE = "flashinfer.autotuner.autotuner"

# module -> names. Dotted names are attributes of a class. Public: the first line of each; the rest is private.
NAMES: Mapping[str, tuple[str, ...]] = {
    MODULE: (
        "AutoTuner", "AutoTuner.choose_one", "AutoTuner.search_cache", "AutoTuner.save_configs",
        "AutoTuner.load_configs", "AutoTuner.clear_cache", "AutoTuner.get", "TunableRunner", "TuningConfig",
        "DynamicTensorSpec", "ConstraintSpec", "make_bucket_mapper", "autotune",
        "AutoTuner._instance", "AutoTuner._profile_single_kernel", "AutoTuner._find_nearest_profile",
        "AutoTuner._get_cache_key", "AutoTuner._get_input_sizes", "AutoTuner._prepare_input_tensors_with_batches",
        "AutoTuner._prepare_input_tensors", "TunableRunner.get_valid_tactics",
        "_collect_metadata", "_METADATA_KEY", "_tactic_to_json", "_json_to_tactic", "_tactic_to_json_hashable",
        "delay_kernel",
    ),
    "flashinfer.utils": ("_get_cache_buf",),
    "flashinfer.version": ("__version__",),
    "flashinfer.jit.env": ("FLASHINFER_WORKSPACE_DIR", "FLASHINFER_CACHE_DIR"),
}  # fmt: skip

# Attributes of an AutoTuner that __init__ makes.
INSTANCE = ("profiling_cache", "_file_configs", "stats", "is_tuning_mode", "_blocklist", "_dirty", "_dirty_seq")

# What 0.7 added; absent from 0.6.16.post3 and not needed there.
NEWER = (
    "get_trtllm_utils_module", "_file_config_policies", "_file_config_selections", "_profiling_cache_policies",
    "_profiling_cache_selections",
)  # fmt: skip


class FlashInferMoved(WarmUpError):
    """This FlashInfer lacks a name that the tuner needs."""


class FlashInferMissing(WarmUpError):
    """FlashInfer cannot be imported at all."""


def load() -> Any:  # noqa: ANN401 - FlashInfer has no types
    """Import FlashInfer and return its autotuner module.

    Raises `FlashInferMissing`, `FlashInferTooOld`, `FlashInferOfNoVersion` or `FlashInferMoved`.
    """
    missing: list[str] = []
    if (here := _version_if_any()) is not None:
        check_version(here)
    for module, names in NAMES.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            if (error.name or "").partition(".")[0] in ("flashinfer", "torch") and error.name not in NAMES:
                raise FlashInferMissing(f"FlashInfer cannot be imported: {error}", hint="install it") from error
            missing.append(module)
            continue
        except OSError as error:  # it makes its workspace while it is imported
            raise FlashInferMissing(
                f"FlashInfer cannot write its workspace: {error}",
                hint="set FLASHINFER_WORKSPACE_BASE to a directory that this user may write",
            ) from error
        except (Exception, SystemExit) as error:
            said = next(iter(str(error).splitlines()), "")
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise FlashInferMissing(
                f"FlashInfer cannot be imported: {type(error).__name__}: {said}",
                details=[*str(error).splitlines()[1:], f"raised in {where.filename}:{where.lineno}"],
                hint=f"`import {module}` has to work with this Python: repair or reinstall what raised it",
            ) from error
        missing += [f"{module}.{name}" for name in names if not _has(found, name)]
    _refuse(missing)
    return importlib.import_module(MODULE)


def check_instance(tuner: object) -> None:
    """Check what an AutoTuner makes for itself; raise `FlashInferMoved`."""
    _refuse([f"{MODULE}.AutoTuner().{name}" for name in INSTANCE if not hasattr(tuner, name)])


def version() -> str:
    """FlashInfer's version."""
    return str(importlib.import_module("flashinfer.version").__version__)


def _version_if_any() -> str | None:
    """The version, or None where it cannot be read: the missing names say enough."""
    try:
        return version()
    except (Exception, SystemExit):  # noqa: BLE001 - an import runs anything
        return None


def has_process_group() -> bool:
    """Whether FlashInfer can average the time of a tactic over a process group."""
    return hasattr(importlib.import_module(MODULE), "set_autotune_process_group")


def metadata() -> dict[str, str]:
    """The environment record that FlashInfer writes into a cache and compares on load."""
    return {str(k): str(v) for k, v in importlib.import_module(MODULE)._collect_metadata().items()}


def arch() -> str:
    """The architecture as FlashInfer names its workspace (`90a`, `80_90a`); empty where it sees no GPU."""
    env = importlib.import_module("flashinfer.jit.env")
    place = env.FLASHINFER_WORKSPACE_DIR.relative_to(env.FLASHINFER_CACHE_DIR)
    return "/".join(place.parts[1:])


def install(tuner: Any) -> None:  # noqa: ANN401 - an AutoTuner
    """Make `tuner` the one that every op and `autotune()` use in this process."""
    check_instance(tuner)
    importlib.import_module(MODULE).AutoTuner._instance = tuner


def entries(tuner: Any) -> dict[str, Held]:  # noqa: ANN401 - an AutoTuner
    """What `save_configs` would write, by file key: loaded entries, and on top of them those tuned here."""
    at = importlib.import_module(MODULE)
    policies, selections = getattr(tuner, "_file_config_policies", {}), getattr(tuner, "_file_config_selections", {})
    held = {
        key: Held(runner, at._tactic_to_json(tactic), at._tactic_to_json(policies.get(key)), selections.get(key))
        for key, (runner, tactic) in tuner._file_configs.items()
    }
    policies, selections = (getattr(tuner, f"_profiling_cache_{name}", {}) for name in ("policies", "selections"))
    for key, (tactic, _) in tuner.profiling_cache.items():
        policy, selection = policies.get((None, key)), selections.get((None, key))
        held[key.file_key] = Held(
            key.runner_class_name, at._tactic_to_json(tactic), at._tactic_to_json(policy), selection
        )
    return held


def offered(runners: Sequence[Any], inputs: list[Any]) -> tuple[tuple[int, Any], ...]:
    """The tactics that each runner offers now for these inputs: (place of the runner, tactic)."""
    return tuple(
        (place, tactic) for place, runner in enumerate(runners) for tactic in runner.get_valid_tactics(inputs, None)
    )


class _Asked(BaseException):
    """The question was asked; the call need not go on. No `Exception`, which an op might take for its own."""


def first_offer(call: Callable[[int], object], tokens: int) -> dict[str, list[Any]]:
    """The tactics, as JSON values, that each runner offers to the first question of a call. Nothing runs on the device.

    An op with several questions says nothing of the others, which follow from the same tensors.
    """
    tuner, found = importlib.import_module(MODULE).AutoTuner.get(), dict[str, list[Any]]()

    def listen(_op: str, runners: list[Any], _config: Any, inputs: list[Any], **_: Any) -> Any:  # noqa: ANN401
        for place, tactic in offered(runners, inputs):
            found.setdefault(type(runners[place]).__name__, []).append(tactic_json(tactic))
        raise _Asked

    tuner.choose_one = listen
    try:
        call(tokens)
    except _Asked:
        pass
    finally:
        del tuner.choose_one
    return found


def prepare(question: Any, runner: int) -> None:  # noqa: ANN401 - a Question
    """What FlashInfer does once for a runner before it measures its tactics, where the runner can be prepared."""
    code = question.runners[runner].forward.__code__
    if "do_preparation" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        question.runners[runner](list(question.inputs), tactic=-1, do_preparation=True, **question.kwargs)


@contextlib.contextmanager
def defaults_for(tuner: Any, file_keys: Collection[str]) -> Iterator[None]:  # noqa: ANN401 - an AutoTuner
    """Let these entries answer with the default for a while."""
    tuned = {key: value for key, value in tuner.profiling_cache.items() if key.file_key in file_keys}
    loaded = {key: value for key, value in tuner._file_configs.items() if key in file_keys}
    tuner.profiling_cache.update({key: (-1, value[1]) for key, value in tuned.items()})
    tuner._file_configs.update({key: (value[0], -1) for key, value in loaded.items()})
    try:
        yield
    finally:
        tuner.profiling_cache.update(tuned)
        tuner._file_configs.update(loaded)


@contextlib.contextmanager
def without(tuner: Any, tactics: Sequence[Mapping[str, Any]]) -> Iterator[None]:  # noqa: ANN401 - an AutoTuner
    """Keep tactics (`custom_op`, `runner`, `tactic`) out of what their runners offer to FlashInfer's tuning."""
    invalid = tuner._blocklist._invalid
    before = {name: set(values) for name, values in invalid.items()}
    for one in tactics:
        invalid.setdefault(f"{one['custom_op']}::{one['runner']}", set()).add(tactic_hashable(one["tactic"]))
    try:
        yield
    finally:
        invalid.clear()
        invalid.update(before)


def scratch_buffer(name: str, size: int, device: Any) -> Any:  # noqa: ANN401
    """FlashInfer's own scratch buffer of an op, `size` bytes: its size is in some keys."""
    return _named("flashinfer.utils", "_get_cache_buf")(name, size, device)


def gemm_dispatch(name: str) -> tuple[Any, int]:
    """A dispatcher of gemm_base in which several backends compete, and the size of its scratch buffer."""
    return _named("flashinfer.gemm.gemm_base", name), _named("flashinfer.gemm.gemm_base", "DEFAULT_WORKSPACE_SIZE")


def jit_spec(module: str, name: str, *arguments: object) -> Any:  # noqa: ANN401 - a JitSpec
    """One JIT module of FlashInfer's, by the function that describes it; raise `FlashInferMoved`."""
    return _named(module, name)(*arguments)


def _named(module: str, name: str) -> Any:  # noqa: ANN401
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FlashInferMoved(
            f"FlashInfer {version()} has no {module}.{name}", hint="use another FlashInfer, or fix pipeline/tune"
        ) from error


def tactic_json(tactic: Any) -> Any:  # noqa: ANN401 - whatever a runner offers
    """A tactic as a JSON value."""
    return importlib.import_module(MODULE)._tactic_to_json(tactic)


def tactic_of(value: Any) -> Any:  # noqa: ANN401
    """A tactic from its JSON value."""
    return importlib.import_module(MODULE)._json_to_tactic(value)


def tactic_hashable(value: Any) -> Any:  # noqa: ANN401
    """A tactic, or its JSON value, as the blocklist compares it."""
    return importlib.import_module(MODULE)._tactic_to_json_hashable(value)


def set_entry(tuner: Any, question: Any, runner: int, tactic: Any) -> str:  # noqa: ANN401 - an AutoTuner, a Question
    """Let `tactic` of the runner at place `runner` answer a question, in place of any entry that answered before.

    Tactic -1 is what every runner does untuned; written as an entry it is a hit like any other. Returns the file key.
    """
    shapes = tuner._get_input_sizes(question.inputs)
    keys = [
        tuner._get_cache_key(
            question.custom_op, one, shapes, question.config, one.get_cache_key_extras(question.inputs)
        )
        for one in question.runners
    ]
    policies, selections = (getattr(tuner, f"_profiling_cache_{name}", {}) for name in ("policies", "selections"))
    profile, policy = None, None
    for key in keys:
        if key in tuner.profiling_cache:
            profile, policy = tuner.profiling_cache.pop(key)[1], policies.pop((None, key), None)
            selections.pop((None, key), None)
        tuner._file_configs.pop(key.file_key, None)
    tuner.profiling_cache[keys[runner]] = (tactic, profile)
    if policy is not None:
        policies[(None, keys[runner])] = policy
    tuner._dirty, tuner._dirty_seq = True, tuner._dirty_seq + 1
    return str(keys[runner].file_key)


def forget(tuner: Any, file_key: str) -> None:  # noqa: ANN401 - an AutoTuner
    """Drop one entry, so that the next call in tuning mode measures it again."""
    for key in [key for key in tuner.profiling_cache if key.file_key == file_key]:
        del tuner.profiling_cache[key]
    tuner._file_configs.pop(file_key, None)


def replace_entries(tuner: Any, held: Mapping[str, Held]) -> None:  # noqa: ANN401 - an AutoTuner
    """Make `held` all that `tuner` holds, as if it had been loaded from a file; `save_configs` then writes it."""
    tuner.clear_cache()
    add_entries(tuner, held)


def add_entries(tuner: Any, held: Mapping[str, Held]) -> None:  # noqa: ANN401 - an AutoTuner
    """Let `tuner` hold `held` beside what it has, as if it had been loaded from a file."""
    at = importlib.import_module(MODULE)
    policies, selections = getattr(tuner, "_file_config_policies", {}), getattr(tuner, "_file_config_selections", {})
    for key, entry in held.items():
        tuner._file_configs[key] = (entry.runner, at._json_to_tactic(entry.tactic))
        if entry.policy is not None:
            policies[key] = at._json_to_tactic(entry.policy)
        if entry.selection is not None:
            selections[key] = dict(entry.selection)


def _has(module: object, name: str) -> bool:
    try:
        reduce(getattr, name.split("."), module)
    except AttributeError:
        return False
    return True


def listed_as_bad(tuner: Any) -> list[str]:  # noqa: ANN401 - an AutoTuner
    """The file keys of entries whose tactic is on the user's own blocklist: a lookup would not ask it."""
    invalid = tuner._blocklist._invalid
    return [
        key
        for key, held in (entries(tuner).items() if invalid else ())
        if tactic_hashable(held.tactic) in invalid.get(f"{key.split(chr(39))[1]}::{held.runner}", ())
    ]


def blocklist_told(tuner: Any, variable: str) -> list[str]:  # noqa: ANN401 - an AutoTuner
    """A line on the user's own blocklist, which takes tactics out of every choice; none where it is empty."""
    invalid = {runner: tactics for runner, tactics in tuner._blocklist._invalid.items() if tactics}
    many = sum(map(len, invalid.values()))
    return [f"{variable} leaves out {many} tactics of {', '.join(sorted(invalid))}"] if invalid else []


def _refuse(missing: list[str]) -> None:
    if missing:
        raise FlashInferMoved(
            " ".join(filter(None, ("FlashInfer", _version_if_any(), f"has no {missing[0]}"))),
            details=[f"missing: {name}" for name in missing],
            hint="use a FlashInfer between 0.6.16.post3 and 0.7.4, or adapt pipeline/tune/flashinfer_api.py",
        )
