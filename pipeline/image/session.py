"""One run of a command that needs a Docker Engine: its client, its log, and what earlier runs left behind.

Every container and every image without a final name carries the id of its run. A run keeps a lock on a file with that
id; the kernel drops it with the process. So the next run knows whose containers and images nobody needs any more.

    <cache home>/runs/<run id>      locked while the run lives
    <cache home>/logs/              full logs, the newest twenty
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.contract.errors import DockerError, UsageError
from pipeline.home import cache_home

if TYPE_CHECKING:
    from docker import DockerClient
    from pipeline.daemon import Engine

RUN = secrets.token_hex(8)  # the id of this process's run
LABEL = "io.github.tuned-image-pipeline.run"  # on containers: the run that made them
UNNAMED = "tuned-image-pipeline/unnamed"  # images that have no name yet, tagged by their run
_LOGS = 20
_FORGOTTEN = 86_400.0  # seconds after which what a run of another cache home left counts as left


@dataclass(frozen=True)
class Session:
    """What every step needs: the engine, its client, the cache home, the log file."""

    engine: Engine
    client: DockerClient
    home: Path
    log: Path

    @property
    def unnamed(self) -> str:
        """The name that this run gives to an image until it gets its own."""
        return f"{UNNAMED}:{RUN}"

    def answers(self) -> bool:
        """Whether the engine still answers."""
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        try:
            return bool(self.client.ping())
        except (DockerException, RequestException, OSError):
            return False


@contextmanager
def open_session(name: str, *, leftovers: bool = True) -> Iterator[Session]:
    """Find or start an engine, remove what killed runs left in it, and close everything on the way out.

    `name` is part of the log's name.
    """
    from pipeline.daemon import connect, ensure

    home = cache_home()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the cache folder {home} cannot be made: {error.strerror}", hint="XDG_CACHE_HOME names another place"
        ) from error
    engine = ensure()
    with contextlib.closing(connect(engine)) as client, translated(engine), _running(home):
        session = Session(engine, client, home, log_file(home, name))
        try:
            if leftovers:
                remove_leftovers(session)
            yield session
        finally:
            with contextlib.suppress(DockerError):
                drop_image(client, session.unnamed)


@contextmanager
def translated(engine: Engine) -> Iterator[None]:
    """Turn errors of the docker SDK that no step expected into a `DockerError`."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except (DockerException, RequestException) as error:
        said = str(getattr(error, "explanation", "") or error).strip().splitlines()
        raise DockerError(
            f"the Docker Engine at {engine.host} failed: {said[-1][:300] if said else type(error).__name__}",
            hint="`pipeline daemon status` shows whether it still answers, and where its log is",
        ) from error


def log_file(home: Path, name: str) -> Path:
    """A new, empty log; all but the newest twenty are removed, whoever else does the same."""
    folder = home / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{RUN[:6]}.log"
    path.touch()
    for old in sorted(folder.glob("*.log"))[:-_LOGS]:  # names begin with the time
        old.unlink(missing_ok=True)
    return path


@contextmanager
def _running(home: Path) -> Iterator[None]:
    folder = home / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: nothing is called left there
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def is_gone(home: Path, run: str, age: float) -> bool:
    """Whether a run has ended without cleaning up.

    `age` is that of what it left, in seconds: a run whose file is not in this cache home is another user's, and
    counts as gone after a day.
    """
    if run == RUN:
        return False
    try:
        handle = os.open(home / "runs" / run, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return age > _FORGOTTEN
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def remove_leftovers(session: Session, *, dry_run: bool = False) -> list[str]:
    """Remove containers and unnamed images of runs that were killed; return what was removed, in words."""
    client, home = session.client, session.home
    removed, runs = [], set()
    for one in client.api.containers(all=True, filters={"label": LABEL}):
        run = str(one["Labels"][LABEL])
        if is_gone(home, run, time.time() - float(one["Created"])):
            removed.append(f"container {one['Id'][:12]} of run {run}")
            runs.add(run)
            if not dry_run:
                drop_container(client, one["Id"])
    for image in client.images.list(name=UNNAMED):
        for tag in image.tags:
            run = tag.rpartition(":")[2]
            if tag.startswith(f"{UNNAMED}:") and is_gone(home, run, time.time() - named(image.attrs)):
                removed.append(f"image {tag}")
                runs.add(run)
                if not dry_run:
                    drop_image(client, tag)
    if not dry_run:
        for run in runs:
            (home / "runs" / run).unlink(missing_ok=True)
        if removed:
            log.note(f"removed what {len(runs)} interrupted run{'s' * (len(runs) > 1)} left: {', '.join(removed)}")
    return removed


def drop_container(client: DockerClient, name: str) -> None:
    """Remove a container with its nameless volumes, running or not; one that is gone, or going, is fine."""
    from http import HTTPStatus

    from docker.errors import APIError, NotFound

    try:
        client.api.remove_container(name, force=True, v=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != HTTPStatus.CONFLICT:  # it is being removed already
            raise


def drop_image(client: DockerClient, name: str) -> None:
    """Take a name from an image, and remove the image where that was its last one and nothing uses it."""
    from docker.errors import APIError, ImageNotFound
    from requests.exceptions import RequestException

    with contextlib.suppress(ImageNotFound, APIError, RequestException, OSError):
        client.images.remove(name)


def made_at(attrs: Any) -> float:  # noqa: ANN401 - the engine's JSON
    """When an image was made, in seconds since the epoch; now where the engine does not say."""
    return _seconds(attrs.get("Created"))


def named(attrs: Any) -> float:  # noqa: ANN401 - the engine's JSON
    """When an image got its last name, in seconds since the epoch; now where the engine does not say.

    `Created` would not do: images of this pipeline have fixed times, so that equal ones are equal.
    """
    return _seconds((attrs.get("Metadata") or {}).get("LastTagTime"))


def _seconds(text: object) -> float:
    text = str(text or "")
    with contextlib.suppress(ValueError):
        when = datetime.fromisoformat(f"{text[:19]}+00:00")
        return when.timestamp() if when.year > 1 else time.time()
    return datetime.now(UTC).timestamp()
