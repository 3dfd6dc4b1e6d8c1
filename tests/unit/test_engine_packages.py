"""The host's apt sources, its os-release, the newer suite and its pin, and what is said where nothing can start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.exits import Exit
from pipeline.daemon import apt, errors, osrelease, packages, remedies, starting
from pipeline.daemon.apt import Source
from pipeline.run import Finished, ProcessFailed

DEB822 = """\
# made by an installer
Types: deb deb-src
URIs: http://mirror.example/debian/ https://second.example/debian
Suites: bookworm bookworm-updates
# a comment inside a stanza
Components: main
 contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://source.example/debian
Suites: bookworm
Components: main
"""
ONE_LINE = """\
# deb http://commented.example/debian bookworm main
deb http://mirror.example/debian/ bookworm main contrib # the nearest
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] https://second.example/debian bookworm main
deb-src http://source.example/debian bookworm main
  deb\thttp://mirror.example/debian-security  bookworm-security  main
deb http://flat.example/packages ./
nonsense
"""


def test_deb822_sources_with_several_addresses_comments_and_switched_off_stanzas() -> None:
    found = apt.parse_deb822(DEB822)
    assert found[0] == Source("http://mirror.example/debian", "bookworm", ("main", "contrib"))
    assert [(s.uri, s.suite) for s in found] == [
        ("http://mirror.example/debian", "bookworm"),
        ("http://mirror.example/debian", "bookworm-updates"),
        ("https://second.example/debian", "bookworm"),
        ("https://second.example/debian", "bookworm-updates"),
        ("http://mirror.example/debian-security", "bookworm-security"),
    ]


def test_one_line_sources_with_options_and_comments() -> None:
    found = apt.parse_one_line(ONE_LINE)
    assert [(s.uri, s.suite, s.components) for s in found] == [
        ("http://mirror.example/debian", "bookworm", ("main", "contrib")),
        ("https://second.example/debian", "bookworm", ("main",)),
        ("http://mirror.example/debian-security", "bookworm-security", ("main",)),
        ("http://flat.example/packages", "./", ()),
    ]


def make_apt(root: Path, **files: str) -> Path:
    (root / "sources.list.d").mkdir(parents=True)
    for name, text in files.items():
        file = root / "sources.list" if name == "main" else root / "sources.list.d" / name.replace("_", ".")
        file.write_text(text)
    return root


def test_all_files_of_the_host_are_read_and_others_are_not(tmp_path: Path) -> None:
    root = make_apt(
        tmp_path / "apt", main=ONE_LINE, debian_sources=DEB822, old_save="deb http://old.example/ bookworm main"
    )
    found = apt.host_sources(root)
    assert apt.mirrors(found, "bookworm") == ("http://mirror.example/debian", "https://second.example/debian")
    assert not any("old.example" in s.uri for s in found)
    assert apt.host_sources(tmp_path / "none") == ()


def test_the_newer_suite_comes_from_the_hosts_own_mirrors_and_is_kept_away_from_the_rest(tmp_path: Path) -> None:
    root = make_apt(tmp_path / "apt", debian_sources=DEB822)
    for _ in range(2):  # a second run finds its own files and changes nothing
        packages.add_newer_suite(root, "bookworm")
        own = (root / "sources.list.d" / "tuned-image-pipeline.sources").read_text()
        assert [(s.uri, s.suite) for s in apt.parse_deb822(own)] == [
            ("http://mirror.example/debian", "trixie"),
            ("http://mirror.example/debian", "trixie-updates"),
            ("https://second.example/debian", "trixie"),
            ("https://second.example/debian", "trixie-updates"),
            ("http://mirror.example/debian-security", "trixie-security"),
        ]
        pin = (root / "preferences.d" / "tuned-image-pipeline").read_text()
        assert "Package: *\nPin: release n=trixie*\nPin-Priority: 100\n" in pin
        assert "docker.io docker-cli docker-buildx containerd\nPin: release n=trixie*\nPin-Priority: 500\n" in pin


def test_a_newer_suite_that_the_host_has_already_serves(tmp_path: Path) -> None:
    root = make_apt(tmp_path / "apt", debian_sources=DEB822, newer_list="deb http://x.example/debian trixie main")
    packages.add_newer_suite(root, "bookworm")
    assert not (root / "sources.list.d" / "tuned-image-pipeline.sources").exists()
    pin = (root / "preferences.d" / "tuned-image-pipeline").read_text()
    assert "Package: *" not in pin
    assert "docker.io" in pin


def test_a_host_without_a_mirror_is_told_so_and_nothing_is_written(tmp_path: Path) -> None:
    root = make_apt(tmp_path / "apt", main="deb http://mirror.example/debian bullseye main")
    with pytest.raises(errors.InstallFailed, match="no mirror for bookworm main") as caught:
        packages.add_newer_suite(root, "bookworm")
    assert caught.value.exit_code == Exit.NO_DOCKER
    assert not (root / "preferences.d").exists()


@pytest.mark.parametrize(
    ("text", "identity", "major", "known"),
    [
        (
            'ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"',
            "debian",
            12,
            True,
        ),
        ("ID=debian\nVERSION_ID=13\n", "debian", 13, True),
        ('ID=debian\nVERSION_ID="11"', "debian", 11, False),
        ('PRETTY_NAME="Debian GNU/Linux forky/sid"\nID=debian\n', "debian", None, True),
        ('# a comment\nID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n', "ubuntu", 24, True),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"', "rocky", 9, False),
        ("NAME='no closing quote", "linux", None, False),
        ("", "linux", None, False),
    ],
)
def test_os_release(text: str, identity: str, major: int | None, known: bool) -> None:
    system = osrelease.parse(text)
    assert (system.id, system.major) == (identity, major)
    assert packages.supported(system) is known


@pytest.mark.parametrize(
    ("text", "installed", "root", "first", "second"),
    [
        ('ID=debian\nVERSION_ID="12"', False, False, "sudo make engine", "sudo make image"),
        (
            "ID=debian\nVERSION_ID=13",
            False,
            False,
            "apt-get install docker.io docker-cli docker-buildx",
            "systemctl start docker",
        ),
        (
            "ID=ubuntu\nID_LIKE=debian",
            False,
            False,
            "apt-get install docker.io docker-buildx",
            "systemctl start docker",
        ),
        ('ID=rocky\nID_LIKE="rhel centos fedora"', False, True, "dnf install moby-engine", "systemctl start docker"),
        ("ID=alpine", False, True, "apk add docker docker-cli-buildx", "service docker start"),
        ("ID=arch", True, False, "systemctl start docker", "usermod -aG docker"),
        ("ID=plan9", False, True, "install Docker Engine with buildx", "systemctl start docker"),
    ],
)
def test_where_none_can_start_two_commands_are_named(
    text: str, installed: bool, root: bool, first: str, second: str
) -> None:
    hint = remedies.hint(osrelease.parse(text), installed=installed, root=root)
    assert 0 <= hint.index(first) < hint.index(second)
    assert "\n" not in hint


@pytest.mark.parametrize(
    ("user", "text", "mounts", "why"),
    [
        (1000, "ID=debian\nVERSION_ID=12", True, "only root can start one"),
        (0, "ID=debian\nVERSION_ID=12", False, "may not mount"),
        (0, 'ID=rocky\nPRETTY_NAME="Rocky Linux 9"', True, "Rocky Linux 9 is not a system"),
    ],
)
def test_nothing_is_installed_where_nothing_could_start(
    user: int, text: str, mounts: bool, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(osrelease, "here", lambda: osrelease.parse(text))
    monkeypatch.setattr(starting, "_may_mount", lambda: mounts)
    with pytest.raises(errors.NoEngine, match=why) as caught:
        starting.start(None)
    assert caught.value.exit_code == Exit.NO_DOCKER
    assert list(tmp_path.iterdir()) == []


class Apt:
    """Stands for `run`: remembers commands; `fails` names a word whose command fails."""

    def __init__(self, fails: str = "") -> None:
        self.commands: list[list[str]] = []
        self.fails = fails

    def __call__(self, command: list[str], **_: Any) -> Finished:
        self.commands.append(command)
        if self.fails and self.fails in command:
            raise ProcessFailed(command, 100, ["E: Unable to locate package docker.io"])
        return Finished(0, "", ())

    def actions(self) -> list[str]:
        return [
            " ".join(w for w in c if not w.startswith(("-", "DPkg"))).replace("apt-get ", "") for c in self.commands
        ]


@pytest.fixture
def fake_apt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apt:
    fake = Apt()
    root = make_apt(tmp_path / "apt", debian_sources=DEB822)
    for name in ("KEYRING", "NEWER_KEY"):
        (tmp_path / name).touch()
        monkeypatch.setattr(packages, name, tmp_path / name)
    monkeypatch.setattr(packages, "run", fake)
    monkeypatch.setattr(apt, "APT", root)
    monkeypatch.setattr(packages, "program", lambda name: None if name == "dockerd" else f"/usr/bin/{name}")
    monkeypatch.setattr(packages, "POLICY", tmp_path / "policy-rc.d")
    return fake


BOOKWORM = osrelease.parse("ID=debian\nVERSION_ID=12\nVERSION_CODENAME=bookworm")
TRIXIE = osrelease.parse("ID=debian\nVERSION_ID=13\nVERSION_CODENAME=trixie")


def test_debian_12_gets_the_source_then_the_packages_and_no_service(fake_apt: Apt, tmp_path: Path) -> None:
    packages.install(BOOKWORM, packages.names(BOOKWORM), tmp_path / "apt.log")
    assert (tmp_path / "apt" / "sources.list.d" / "tuned-image-pipeline.sources").is_file()
    actions = fake_apt.actions()
    assert actions[:2] == [
        "update",
        "install docker.io docker-cli docker-buildx containerd iptables iproute2 ca-certificates",
    ]
    assert actions[2:] == [
        "/usr/bin/systemctl disable docker.service docker.socket containerd.service",
        "/usr/bin/update-rc.d docker disable",
    ]
    assert not (tmp_path / "policy-rc.d").exists()


def test_debian_13_needs_no_source_and_buildx_alone_disables_nothing(fake_apt: Apt, tmp_path: Path) -> None:
    packages.install(TRIXIE, ("docker-buildx",), tmp_path / "apt.log")
    assert fake_apt.actions() == ["update", "install docker-buildx"]
    assert not (tmp_path / "apt" / "preferences.d").exists()


def test_an_old_keyring_is_renewed_first(fake_apt: Apt, tmp_path: Path) -> None:
    (tmp_path / "NEWER_KEY").unlink()
    packages.install(BOOKWORM, ("docker-buildx",), tmp_path / "apt.log")
    assert fake_apt.actions() == ["update", "install debian-archive-keyring", "update", "install docker-buildx"]


def test_a_broken_third_source_does_not_stop_the_install(fake_apt: Apt, tmp_path: Path) -> None:
    fake_apt.fails = "update"
    packages.install(TRIXIE, ("docker-buildx",), tmp_path / "apt.log")
    assert fake_apt.actions()[-1] == "install docker-buildx"


def test_a_failed_install_shows_apts_own_words(fake_apt: Apt, tmp_path: Path) -> None:
    fake_apt.fails = "install"
    with pytest.raises(errors.InstallFailed, match="apt could not install the engine") as caught:
        packages.install(TRIXIE, packages.names(TRIXIE), tmp_path / "apt.log")
    assert caught.value.details == ("E: Unable to locate package docker.io",)
    assert caught.value.exit_code == Exit.NO_DOCKER
    assert caught.value.log == str(tmp_path / "apt.log")
    assert not (tmp_path / "policy-rc.d").exists()


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def denies(policy: Path, service: str) -> bool:
    from pipeline.run import run

    return run([str(policy), service, "start"], accept=range(256)).status == 101


def test_package_scripts_may_not_start_docker_but_anything_else(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    with packages.no_service_starts(policy):
        assert [denies(policy, s) for s in ("docker", "docker.socket", "containerd", "ssh")] == [
            True,
            True,
            True,
            False,
        ]
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_is_there_is_asked_for_the_rest_and_put_back(tmp_path: Path) -> None:
    policy = script(tmp_path / "policy-rc.d", 'case "$1" in ssh) exit 101;; esac')
    before = policy.read_bytes()
    with packages.no_service_starts(policy):
        assert [denies(policy, s) for s in ("docker", "ssh", "cron")] == [True, True, False]
    assert policy.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["policy-rc.d"]


def test_a_policy_that_forbids_already_is_left_alone(tmp_path: Path) -> None:
    policy = script(tmp_path / "policy-rc.d", "exit 101")
    before = policy.stat()
    with packages.no_service_starts(policy):
        assert policy.stat() == before
    assert policy.stat() == before


@pytest.mark.parametrize("had_policy", [True, False])
def test_what_a_killed_run_left_behind_is_put_right(tmp_path: Path, had_policy: bool) -> None:
    policy = tmp_path / "policy-rc.d"
    if had_policy:
        script(policy, "exit 0")
    killed = packages.no_service_starts(policy)
    killed.__enter__()  # and never left: its process was killed
    assert policy.exists()
    with packages.no_service_starts(policy):
        assert denies(policy, "docker")
    assert [f.name for f in tmp_path.iterdir()] == (["policy-rc.d"] if had_policy else [])
    if had_policy:
        assert policy.read_text() == "#!/bin/sh\nexit 0\n"
