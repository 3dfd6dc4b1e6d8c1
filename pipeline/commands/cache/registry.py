"""`pipeline cache push|pull`: caches in a registry."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipeline.commands.cache.files import add_output
from pipeline.commands.locations import METAVAR, SCHEME, opened, reference
from pipeline.contract.errors import Exit

if TYPE_CHECKING:
    from pipeline.release.caches import Stored


def configure_push(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache push`."""
    parser.add_argument("source", metavar=METAVAR)
    parser.add_argument("to", metavar="oci://HOST/REPO[:TAG]", help="the tag is `latest` unless given")
    parser.add_argument(
        "--sign", default="", metavar="KEY", help="cosign.key or env://NAME; its password: COSIGN_PASSWORD"
    )
    parser.add_argument("--move", action="store_true", help="move a tag that names another cache")


def configure_pull(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cache pull`."""
    parser.add_argument("source", metavar="oci://HOST/REPO[:TAG][@DIGEST]")
    add_output(parser, "a new or empty directory")
    parser.add_argument(
        "--key", default="", metavar="FILE", help="require a signature by this key: cosign.pub or env://NAME"
    )


def execute_push(arguments: argparse.Namespace) -> int:
    """Push; prints the name by digest on stdout."""
    from pipeline.contract.errors import UsageError
    from pipeline.registry.client import Registry
    from pipeline.release import caches
    from pipeline.release.cosign import Signer

    to = reference(arguments.to)
    if to.digest:
        raise UsageError(f"{arguments.to} names a digest", hint="a push makes the digest: give a tag")
    signer = Signer(arguments.sign) if arguments.sign else None
    with opened(arguments.source) as root, Registry(to.registry) as registry:
        _say(caches.push(registry, root, arguments.source, to, signer=signer, move=arguments.move))
    return int(Exit.OK)


def execute_pull(arguments: argparse.Namespace) -> int:
    """Pull; prints the name by digest on stdout."""
    from pipeline.registry.client import Registry
    from pipeline.release import caches
    from pipeline.release.cosign import Verifier

    source = reference(arguments.source)
    with Registry(source.registry) as registry:
        _say(caches.pull(registry, source, arguments.output, verifier=Verifier(arguments.key)))
    return int(Exit.OK)


def _say(stored: Stored) -> None:
    from pipeline import log

    for key in stored.keys:
        log.note(key)
    print(f"{SCHEME}{stored.reference}")
