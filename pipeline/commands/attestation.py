"""`pipeline attestation verify IMAGE`: check the signature and attestations of an image in a registry."""

from __future__ import annotations

import argparse
import json


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `attestation verify`."""
    parser.add_argument("image", metavar="IMAGE", help="registry/repository[:tag][@digest]")
    parser.add_argument(
        "--key", default="", metavar="FILE", help="the public key: cosign.pub, env://NAME, or a KMS's address"
    )
    parser.add_argument("--identity", default="", metavar="ID", help="of a keyless signature: who signed")
    parser.add_argument(
        "--issuer", default="", metavar="URL", help="of a keyless signature: who vouches for the identity"
    )
    parser.add_argument(
        "--transparency-log", action="store_true", help="the signature must be in the public log as well"
    )
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")


def execute(arguments: argparse.Namespace) -> int:
    """Say of each thing how it stands; exit 8 unless all of it is there and fits."""
    from pipeline.contract.errors import UsageError
    from pipeline.registry.client import Registry
    from pipeline.registry.reference import Reference
    from pipeline.release.cosign import Verifier
    from pipeline.release.verify import examine

    if not arguments.image:
        raise UsageError("no image was named", hint="make attest IMAGE=registry.example.com/team/tuned:tag")
    reference = Reference.in_registry(arguments.image)
    verifier = Verifier(arguments.key, arguments.identity, arguments.issuer, arguments.transparency_log)
    with Registry(reference.registry) as registry:
        found = examine(registry, reference, verifier)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print(f"{found.image} is {found.digest}")
        for answer in found.answers:
            print(f"  {answer}")
    found.demand()
    return 0
