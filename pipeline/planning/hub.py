"""config.json of a model on the Hugging Face hub: that one file, from the local cache where the hub does not answer."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.contract.errors import UsageError

FILE = "config.json"
PROBE_SECONDS = 5.0


class HubRefused(UsageError):
    """The hub did not give a config.json."""


def _answers(endpoint: str) -> bool:
    """Whether the hub can be reached at all: the client itself would try for half a minute before it gave up.

    Raises `ValueError` where `endpoint` is no address.
    """
    parts = urlsplit(endpoint)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY")):
        return True  # only the client knows the way
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=PROBE_SECONDS):
            return True
    except OSError:
        return False


def fetch_config(model: str, instead: str) -> Path:
    """The path of config.json of `owner/name` or `owner/name@revision`, downloaded or from the client's cache.

    Raises `HubRefused`; `instead` is what its hint offers.
    """
    try:
        import huggingface_hub  # reads its variables here
        from huggingface_hub import constants, errors
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        offline = constants.HF_HUB_OFFLINE or not _answers(constants.ENDPOINT)
    except ValueError as error:
        named = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("HF_")}
        said = ", ".join(f"{name}={value!r}" for name, value in named.items() if "TOKEN" not in name)
        raise HubRefused(f"the hub's client does not take {said or 'its settings'}: {error}", hint=instead) from None
    repository, _, revision = model.partition("@")
    try:
        return Path(
            huggingface_hub.hf_hub_download(repository, FILE, revision=revision or None, local_files_only=offline)
        )
    except errors.GatedRepoError:
        problem = f"{repository} is gated on the hub and this account has no access"
    except errors.RepositoryNotFoundError:
        problem = f"the hub has no model {repository}, or it is private"
    except errors.RevisionNotFoundError:
        problem = f"{repository} has no revision {revision!r} on the hub"
    except errors.LocalEntryNotFoundError:
        problem = f"{model} is not in the local cache and the hub cannot be reached"
    except errors.EntryNotFoundError:
        problem = f"{repository} has no {FILE} on the hub"
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        problem = f"{model}: {(str(error).splitlines() or [type(error).__name__])[0]}"
    raise HubRefused(problem, hint=instead)
