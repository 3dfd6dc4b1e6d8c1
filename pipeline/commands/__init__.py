"""The commands of `pipeline`: their names, what each does in one line, and examples that run as they stand.

`COMMANDS` is the tree. A command names the module below `pipeline.commands` that has its two functions:
`configure(parser)` adds arguments, `execute(arguments)` does the work and returns an exit code. `module:name` means
`configure_name` and `execute_name` of a module that has several commands. A module is imported only when its command
is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command: its module, one line for help, and examples (what stands behind `pipeline NAME`)."""

    module: str
    help: str
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Commands below one name."""

    help: str
    commands: Mapping[str, Command]


COMMANDS: Mapping[str, Command | Group] = {
    "build": Command(
        "build",
        "build an image that has already made its first start: warm up, bake, verify, tag",
        (
            "tiny",
            "tiny --server vllm",
            "./model/ --server vllm --base-image vllm/vllm-openai:v0.26.0 --server-args '--model /mnt/models'",
            "llama-3.1-8b --tp 1 --base-image vllm/vllm-openai:v0.26.0 --gpus 0",
            "tiny --retune",
            "tiny --cache caches/h200",
        ),
    ),
    "plan": Command(
        "plan",
        "print what would be tuned for a model, which server uses it, and what else a cold start can save",
        ("tiny", "llama-3.1-8b --tp 2 --arch h200", "DeepSeek-V3 --tp 8 --ep 8 --arch b200 -o plan.json"),
    ),
    "tune": Command(
        "tune",
        "tune into the host's store, without an image",
        ("tiny", "llama-3.1-8b --tp 2 --strategy sharded"),
    ),
    "warm-up": Command(
        "warm_up",
        "make a server's first start in this container, without a Docker Engine, and keep its caches",
        ("./config.json --in-place out --server vllm --server-args '--model /mnt/models --max-model-len 8192'",),
    ),
    "verify": Command(
        "verify",
        "start fresh containers of an image and prove that nothing is tuned or compiled again",
        ("tuned/tiny:1", "tuned/tiny:1 --level static -o verdict.json"),
    ),
    "report": Command(
        "report",
        "write a page about an image: its start by phase, caches, tuned ops, steps, layers, versions, verdict",
        ("tuned/tiny:1", "tuned/tiny:1 -o tiny.html --verdict verdict.json"),
    ),
    "explain": Command(
        "explain",
        "say whether a cache would be used here, and if not, why",
        (
            "tuned/tiny:1",
            "tuned/tiny:1 --live",
            "autotune_configs.json --env record.json",
            "vllm/llama:1 -e HF_HUB_OFFLINE=0 -- --model /mnt/models --max-num-seqs 256",
        ),
    ),
    "cache": Group(
        "list, compare, merge, move and remove tuned caches",
        {
            "ls": Command(
                "cache.files:ls",
                "list caches in the host's store or at a location",
                ("", "tuned/tiny:1", "oci://registry.example.com/caches:h200"),
            ),
            "inspect": Command(
                "cache.files:inspect",
                "show what a cache contains, and what is wrong with it; exit 7 if anything is wrong",
                ("tuned/tiny:1", "caches/h200 --key 3f2a", "autotune_configs.json --json"),
            ),
            "diff": Command(
                "cache.files:diff",
                "compare two caches; exit 3 where they differ",
                ("caches/monday caches/tuesday", "tuned/tiny:1 tuned/tiny:2"),
            ),
            "merge": Command(
                "cache.files:merge",
                "merge caches into one; the same key with other contents is refused",
                ("caches/h100 caches/h200 -o caches/both", "rank_0.json rank_1.json -o autotune_configs.json"),
            ),
            "add": Command(
                "cache.files:add",
                "add caches to an image, a layer each, without building it",
                ("tuned/tiny:1 caches/h200 --image tuned/tiny:2",),
            ),
            "export": Command(
                "cache.files:export",
                "copy caches into a new directory",
                ("tuned/tiny:1 -o caches/tiny", "oci://registry.example.com/caches:h200 -o caches/h200"),
            ),
            "push": Command(
                "cache.registry:push",
                "push caches to a registry, checked first",
                (
                    "tuned/tiny:1 oci://registry.example.com/caches:tiny",
                    "caches/h200 oci://registry.example.com/caches:h200 --sign cosign.key",
                ),
            ),
            "pull": Command(
                "cache.registry:pull",
                "pull caches from a registry into a new directory, checked",
                (
                    "oci://registry.example.com/caches:h200 -o caches/h200",
                    "oci://registry.example.com/caches:h200 -o caches/h200 --key cosign.pub",
                ),
            ),
            "rm": Command(
                "cache.store",
                "remove caches from the host's store",
                ("--older-than 30 --dry-run", "--unused"),
            ),
        },
    ),
    "release": Group(
        "push verified images to a registry, with signatures and attestations",
        {
            "cells": Command(
                "release:cells",
                "list the cells (one image each): what each needs, its command, and whether the registry has it",
                ("--matrix release.toml --json", "tiny --registry localhost:5000"),
            ),
            "run": Command(
                "release:run",
                "build, verify, push, attest, sign and tag each cell",
                (
                    "tiny --registry localhost:5000",
                    "--matrix release.toml --sign cosign.key",
                    "--matrix release.toml --dry-run",
                    "--matrix release.toml --cell tiny-tp1 --sign cosign.key",
                ),
            ),
            "finish": Command(
                "release:finish",
                "make indexes of platforms, give tags; fail with the cells that are missing",
                ("--matrix release.toml --sign cosign.key --floating-tag latest",),
            ),
        },
    ),
    "attestation": Group(
        "check signatures and attestations of images in a registry",
        {
            "verify": Command(
                "attestation",
                "check signature, provenance, SBOM, autotune manifest and verdict",
                ("registry.example.com/team/tuned:1 --key cosign.pub",),
            ),
        },
    ),
    "versions": Group(
        "keep every version equal to versions.json",
        {
            "check": Command(
                "versions:check",
                "prove that every version agrees with versions.json",
                ("", "--fix", "--format github", "--root DIR --versions docker/versions.json"),
            ),
            "sync": Command("versions:sync", "render docker/ and requirements/ from versions.json", ("",)),
            "bump": Command(
                "versions:bump",
                "change a version, and everything that depends on it",
                ("FLASHINFER_VERSION=0.7.4 --dry-run", "--latest TORCH_VERSION"),
            ),
            "usages": Command("versions:usages", "list every place that uses a version", ("FLASHINFER_VERSION",)),
            "args": Command(
                "versions:args", "print the ARGs of Dockerfiles as BuildKit reads them", ("docker/Dockerfile",)
            ),
            "pins": Command(
                "versions:pins", "print the requirements of requirements files", ("requirements/host.txt",)
            ),
        },
    ),
    "init": Command(
        "init", "begin a project: versions.json, templates, Dockerfiles, locks, Makefile, a workflow", ("images",)
    ),
    "clean": Command(
        "clean",
        "remove files and images that nothing used for days, and what killed runs left",
        ("--dry-run", "--days 7"),
    ),
    "daemon": Group(
        "find, start, stop and remove a Docker Engine",
        {
            "up": Command(
                "daemon:up",
                "use the Docker Engine that answers, else install and start a private one (root, Debian)",
                ("", "--store containerd"),
            ),
            "status": Command(
                "daemon:status", "say which Docker Engine answers; exit 4 when none does", ("", "--json")
            ),
            "down": Command("daemon:down", "stop the private Docker Engine; its images stay", ("",)),
            "remove": Command(
                "daemon:remove",
                "stop the private Docker Engine and remove what `up` installed: packages, apt source and pin",
                ("", "--data"),
            ),
        },
    ),
}


def commands() -> Iterator[tuple[tuple[str, ...], Command]]:
    """Every command with the words that call it."""
    for name, one in COMMANDS.items():
        if isinstance(one, Command):
            yield (name,), one
        else:
            yield from (((name, inner), command) for inner, command in one.commands.items())
