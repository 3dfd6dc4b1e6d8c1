"""`pipeline cache push` and `cache pull`: tuned caches in a registry."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.exits import Exit

if TYPE_CHECKING:
    from pipeline.registry.reference import Reference
    from pipeline.release.caches import Stored

_SCHEME = "oci://"


def configure(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the two actions to those of `cache`."""
    push = actions.add_parser("push", help="put caches into a registry, judged first")
    push.add_argument("source", metavar="DIR|IMAGE|oci:DIR", help="a cache root, an image in the engine, an OCI layout")
    push.add_argument("to", metavar="oci://REGISTRY/REPO[:TAG]", help="the tag is `latest` unless given")
    push.add_argument(
        "--sign", default="", metavar="KEY", help="cosign.key or env://NAME; its password: COSIGN_PASSWORD"
    )
    push.add_argument("--move", action="store_true", help="move a tag that leads to another cache")
    pull = actions.add_parser("pull", help="take caches out of a registry, judged; CACHE=DIR bakes them")
    pull.add_argument("source", metavar="oci://REGISTRY/REPO[:TAG][@DIGEST]")
    pull.add_argument("out", metavar="DIR", help="a new or empty directory")
    pull.add_argument("--key", default="", metavar="FILE", help="demand a signature: cosign.pub or env://NAME")


def push(arguments: argparse.Namespace) -> int:
    """Push; prints the name by digest on stdout."""
    from pipeline.commands._caches import root_of
    from pipeline.contract.errors import UsageError
    from pipeline.registry.client import Registry
    from pipeline.release import caches
    from pipeline.release.sign import Signer

    to = _reference(arguments.to)
    if to.digest:
        raise UsageError(f"{arguments.to} names a digest", hint="a digest is what comes of a push: give a tag")
    signer = Signer(arguments.sign) if arguments.sign else None
    with root_of(arguments.source) as root, Registry(to.registry) as registry:
        _say(caches.push(registry, root, arguments.source, to, signer=signer, move=arguments.move))
    return int(Exit.OK)


def pull(arguments: argparse.Namespace) -> int:
    """Pull; prints the name by digest on stdout."""
    from pipeline.contract.errors import UsageError
    from pipeline.registry.client import Registry
    from pipeline.release import caches

    source = _reference(arguments.source)
    if not arguments.out:
        raise UsageError("no directory was named", hint="a new or empty one: caches/h200 (DIR=…)")
    with Registry(source.registry) as registry:
        _say(caches.pull(registry, source, Path(arguments.out), key=arguments.key))
    return int(Exit.OK)


def _reference(text: str) -> Reference:
    from pipeline.registry.errors import ReferenceInvalid
    from pipeline.registry.reference import Reference

    if not text:
        raise ReferenceInvalid("no registry's side was named", hint="oci://registry.example.com/caches:tag (OCI=…)")
    if not text.startswith(_SCHEME):
        raise ReferenceInvalid(f"{text!r} does not begin with {_SCHEME}", hint="oci://registry.example.com/caches:tag")
    return Reference.in_registry(text.removeprefix(_SCHEME))


def _say(stored: Stored) -> None:
    from pipeline import log

    for key in stored.keys:
        log.note(key)
    print(f"{_SCHEME}{stored.reference}")
