"""The two commands that help where no engine answers and none may be started: one installs, one starts."""

from __future__ import annotations

from .osrelease import System

_START = "sudo systemctl start docker"
# By os-release's ID or ID_LIKE. Debian 12 is not here: its own docker.io is too old (see `packages`).
_INSTALL = {
    "ubuntu": "sudo apt-get install docker.io docker-buildx",
    "debian": "sudo apt-get install docker.io docker-cli docker-buildx",
    "fedora": "sudo dnf install moby-engine docker-buildx",
    "arch": "sudo pacman -S docker docker-buildx",
    "alpine": "sudo apk add docker docker-cli-buildx",
    "suse": "sudo zypper install docker docker-buildx",
}
_STARTS = {"alpine": "sudo service docker start"}
_DEBIAN_12 = 12


def hint(system: System, *, installed: bool, root: bool) -> str:
    """What to type, as one line; `installed` says that dockerd is there and only does not run."""
    kinds = [k for k in (system.id, *system.like) if k in _INSTALL]
    start = next((_STARTS[k] for k in kinds if k in _STARTS), _START)
    if system.id == "debian" and system.major == _DEBIAN_12 and not root:
        return "`sudo make engine` installs and starts one for root, then `sudo make image MODEL=…`; or set DOCKER_HOST"
    if installed:
        return f"`{start}`, then `sudo usermod -aG docker $USER` if that is not done yet; or set DOCKER_HOST"
    if kinds:
        return f"`{_INSTALL[kinds[0]]}`, then `{start}`; or set DOCKER_HOST"
    return f"install Docker Engine with buildx, then `{start}`; or set DOCKER_HOST"
