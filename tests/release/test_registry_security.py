"""To whom credentials go: stand-ins play the registry that was asked, its token server, and the attacker."""

# ruff: noqa: SIM117 - a server and what is expected of it read better apart

from __future__ import annotations

import base64
import json
import os
import re
import threading

import pytest
from release_registries import NOBODY, PASSWORD, QUICK, USER, auth_of, image
from release_standin import Standin

from pipeline.contract.errors import Exit, UsageError
from pipeline.registry.client import Registry, parallel_map
from pipeline.registry.credentials import HUB_KEY, Credentials, Login, docker_config
from pipeline.registry.errors import InvalidResponse, RegistryError
from pipeline.registry.http import challenges
from pipeline.registry.reference import Reference, api_host, is_loopback
from pipeline.release.images import read_image

BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
DIGEST = "sha256:" + "0" * 64


def login(host, **entry):
    return Credentials((("test", {"auths": {host: entry or auth_of(USER, PASSWORD)}}),))


def challenge(value):
    return 401, {"WWW-Authenticate": value}, b"{}"


def token(realm, **more):
    return challenge(", ".join([f'Bearer realm="{realm}"', 'service="test"']))


# Redirects


@pytest.mark.parametrize("scheme", ["basic", "bearer"])
def test_a_challenge_after_a_redirect_to_another_origin_is_not_answered(scheme):
    """The class of CVE-2020-15157: a redirect's target asks for the password of the registry."""
    with Standin(lambda r: challenge('Basic realm="x"') if scheme == "basic" else token(f"{attacker.url}/token")) as attacker:  # fmt: skip
        with Standin(lambda r: (307, {"Location": f"{attacker.url}/blob"}, b"")) as server:
            with Registry(server.host, login(server.host), QUICK) as registry, pytest.raises(RegistryError) as caught:
                registry.blob("some/where", DIGEST)
    assert attacker.host in caught.value.message and caught.value.exit_code == Exit.PUBLISH
    assert len(attacker.seen) == 1 and attacker.secrets() == []


def test_an_answered_challenge_is_not_repeated_after_a_redirect(tmp_path, monkeypatch):
    """Neither what the registry was given, nor what ~/.netrc has for the target."""
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password netrc-word\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))

    def ask(request):
        if request.authorization != BASIC:
            return challenge('Basic realm="x"')
        return 307, {"Location": f"{store.url}/blob", "Set-Cookie": "session=secret"}, b""

    with Standin(lambda r: (200, {}, b"content")) as store, Standin(ask) as server:
        with (
            Registry(server.host, login(server.host), QUICK) as registry,
            pytest.raises(InvalidResponse, match="digest"),
        ):
            registry.blob("some/where", DIGEST)
        assert [one.authorization for one in server.seen] == ["", BASIC]
    assert len(store.seen) == 1 and store.secrets() == [] and "cookie" not in store.seen[0].headers


def test_a_redirect_within_the_registry_is_answered():
    def ask(request):
        if request.path != "/elsewhere":
            return 307, {"Location": "/elsewhere"}, b""
        return (200, {}, b"") if request.authorization == BASIC else challenge('Basic realm="x"')

    with Standin(ask) as server, Registry(server.host, login(server.host), QUICK) as registry:
        assert registry.has_blob("some/where", DIGEST)


@pytest.mark.parametrize("place", ["http://registry.example.com/x", "ftp://127.0.0.1/x", "http://me@127.0.0.1/x", "http://[bad"])  # fmt: skip
def test_a_redirect_to_what_is_not_encrypted_is_not_followed(place):
    with Standin(lambda r: (302, {"Location": place}, b"")) as server:
        with Registry(server.host, NOBODY, QUICK) as registry, pytest.raises(InvalidResponse):
            registry.has_blob("some/where", DIGEST)


def test_a_redirect_in_a_circle_ends():
    with Standin(lambda r: (302, {"Location": "/again"}, b"")) as server:
        with Registry(server.host, NOBODY, QUICK) as registry, pytest.raises(InvalidResponse, match="circle"):
            registry.has_blob("some/where", DIGEST)
    assert len(server.seen) < 10


def test_an_upload_that_is_sent_elsewhere_carries_no_credentials():
    def ask(request):
        if request.method == "HEAD":
            return 404, {}, b""
        return (
            (202, {"Location": f"{store.url}/upload"}, b"") if request.authorization else challenge('Basic realm="x"')
        )

    with Standin(lambda r: challenge('Basic realm="x"')) as store, Standin(ask) as server:
        with Registry(server.host, login(server.host), QUICK) as registry, pytest.raises(RegistryError):
            registry.put_blob("some/where", b"content")
    assert len(store.seen) == 1 and store.secrets() == []


# Token servers


@pytest.mark.parametrize("entry", [auth_of(USER, PASSWORD), {"identitytoken": "refresh-word"}])
def test_a_token_server_that_redirects_is_not_followed(entry):
    with Standin(lambda r: (200, {}, b'{"token": "t"}')) as attacker:
        with Standin(lambda r: (307, {"Location": f"{attacker.url}/token"}, b"")) as tokens:
            with Standin(lambda r: token(f"{tokens.url}/token")) as server:
                with Registry(server.host, login(server.host, **entry), QUICK) as registry:
                    with pytest.raises(InvalidResponse, match="not sent on"):
                        registry.has_blob("some/where", DIGEST)
    assert len(tokens.seen) == 1 and attacker.seen == []


@pytest.mark.parametrize("realm", ["http://tokens.example.com/token", "ftp://x/", "nonsense", "http://[bad", "http://me@127.0.0.1/"])  # fmt: skip
@pytest.mark.parametrize("entry", [auth_of(USER, PASSWORD), {"identitytoken": "refresh-word"}])
def test_a_password_is_never_sent_unencrypted(realm, entry):
    with Standin(lambda r: token(realm)) as server:
        with Registry(server.host, login(server.host, **entry), QUICK) as registry, pytest.raises(InvalidResponse) as caught:  # fmt: skip
            registry.has_blob("some/where", DIGEST)
    assert server.secrets() == [] and PASSWORD not in str(caught.value)


@pytest.mark.parametrize("header", [
    'Bearer realm="REALM",service="test", Basic realm="Registry"',
    'Basic realm="Registry", Bearer realm="REALM",service="test",scope="a,b"',
    'Negotiate, bearer service=test , realm="REALM"',
])  # fmt: skip
def test_one_of_several_challenges_is_answered_with_a_token_fetched_once(header):
    def grant(request):
        right = request.authorization == BASIC and request.query == {"service": "test", "scope": "repository:some/where:pull"}  # fmt: skip
        return (200, {}, b'{"token": "granted"}') if right else (401, {}, b"{}")

    def ask(request):
        fine = request.authorization == "Bearer granted"
        return (200, {}, b"") if fine else challenge(header.replace("REALM", f"{tokens.url}/token"))

    with Standin(grant) as tokens, Standin(ask) as server, Registry(server.host, login(server.host), QUICK) as registry:
        assert registry.has_blob("some/where", DIGEST) and registry.has_blob("some/where", DIGEST)
        assert len(tokens.seen) == 1


def test_an_identity_token_is_posted_to_the_token_server():
    def grant(request):
        return 200, {}, b'{"access_token": "granted"}'

    def ask(request):
        return (200, {}, b"") if request.authorization == "Bearer granted" else token(f"{tokens.url}/token")

    entry = {"identitytoken": "refresh-word"}
    with Standin(grant) as tokens, Standin(ask) as server, Registry(server.host, login(server.host, **entry), QUICK) as registry:  # fmt: skip
        assert registry.has_blob("some/where", DIGEST)
        assert tokens.seen[0].method == "POST" and tokens.seen[0].form["refresh_token"] == "refresh-word"
        assert server.secrets() == ["Bearer granted"]


@pytest.mark.parametrize("answer", [b"[]", b"{}", b"[" * 100_000, b'{"token": "a\\r\\nb"}', b"\xff"])
def test_an_answer_without_a_token_is_refused(answer):
    with Standin(lambda r: (200, {}, answer)) as tokens, Standin(lambda r: token(f"{tokens.url}/t")) as server:
        with (
            Registry(server.host, login(server.host), QUICK) as registry,
            pytest.raises(InvalidResponse, match="no token"),
        ):
            registry.has_blob("some/where", DIGEST)


def test_a_refused_login_ends_at_once():
    with Standin(lambda r: challenge('Basic realm="x"')) as server:
        for credentials, requests in ((NOBODY, 1), (login(server.host), 3)):
            with Registry(server.host, credentials, QUICK) as registry, pytest.raises(RegistryError) as caught:
                registry.has_blob("some/where", DIGEST)
            assert len(server.seen) == requests and "docker login" in caught.value.hint
    with Standin(lambda r: challenge("Kerberos abc==")) as server:
        with Registry(server.host, NOBODY, QUICK) as registry, pytest.raises(InvalidResponse, match="unknown kind"):
            registry.has_blob("some/where", DIGEST)


def test_challenges_are_read_as_the_standard_has_them():
    found = challenges(r'Bearer realm="https://x/t",service="a, b=\"c\"",scope="s" , Basic realm="Registry"')
    assert found == {
        "bearer": {"realm": "https://x/t", "service": 'a, b="c"', "scope": "s"}, "basic": {"realm": "Registry"},
    }  # fmt: skip


def test_requests_that_are_challenged_at_the_same_time_are_all_answered():
    """The answer that one of them brought must not look to the others as if it had been refused."""
    together = threading.Barrier(4, timeout=30)

    def ask(request):
        if request.authorization:
            return 200, {}, b""
        together.wait()
        return challenge('Basic realm="x"')

    with Standin(ask) as server, Registry(server.host, login(server.host), QUICK) as registry:
        assert parallel_map(lambda _: registry.has_blob("some/where", DIGEST), range(4), 4) == [True] * 4


# Logins


@pytest.mark.parametrize(
    ("proxy", "said"),
    [
        ("http://u:hunter2@localhost:1", r"the proxy localhost:1 \(HTTPS_PROXY\) gives no connection to nosuch"),
        ("u:hunter2@localhost:1", r"the proxy localhost:1 \(HTTPS_PROXY\) gives no connection to nosuch"),
        ("http://u:hunter2@[::1", "HTTPS_PROXY is not a proxy's address"),
        ("http://localhost:x y", "HTTPS_PROXY is not a proxy's address"),
        ("socks5://u:hunter2@localhost", "HTTPS_PROXY is not a proxy's address"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named_without_its_login(proxy, said, monkeypatch):
    for name in ("https_proxy", "all_proxy", "no_proxy", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with Registry("nosuch.example", NOBODY, QUICK) as registry, pytest.raises(RegistryError, match=said) as caught:
        read_image(registry, "a", "b")
    assert "hunter2" not in caught.value.message and caught.value.hint


def test_a_pipe_as_config_json_is_refused(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UsageError, match=r"config\.json"):
        Credentials.load({"DOCKER_CONFIG": str(tmp_path)})


def test_a_login_for_a_namespace_serves_that_namespace_alone():
    def known(user):
        return auth_of(user, "word")

    auths = {"quay.io/team": known("team"), "quay.io": known("all"), "other.io/team/deep": known("deep"),
             "https://old.example.com/v1/": known("old")}  # fmt: skip
    credentials = Credentials((("test", {"auths": auths}),))
    asked = {
        ("quay.io", "team/model"): "team", ("quay.io", "team"): "team", ("quay.io", "teammate/model"): "all",
        ("quay.io", ""): "all", ("other.io", "team/deep/model"): "deep", ("other.io", "team/model"): None,
        ("old.example.com", "a/b"): "old", ("quay.io.example.com", "team/model"): None,
    }  # fmt: skip
    for (registry, repository), user in asked.items():
        found = credentials.login(registry, repository)
        assert (found.username if found else None) == user, (registry, repository)


@pytest.mark.parametrize("key", [HUB_KEY, "docker.io", "index.docker.io", "registry-1.docker.io"])
def test_docker_hub_has_one_login_under_all_its_names(key):
    credentials = Credentials((("test", {"auths": {key: auth_of("me", "word")}}),))
    for name in ("docker.io", "index.docker.io", "registry-1.docker.io"):
        assert credentials.login(name, "library/alpine") == Login("me", "word")
    with docker_config("docker.io", Login("me", "word")) as folder:
        assert list(json.loads((folder / "config.json").read_text())["auths"]) == [HUB_KEY]


def test_docker_hubs_names_lead_to_its_registry():
    assert api_host("docker.io") == api_host("index.docker.io") == "registry-1.docker.io"
    assert api_host("quay.io") == "quay.io"
    assert str(Reference.in_registry("index.docker.io/alpine:3")) == "docker.io/library/alpine:3"
    assert str(Reference.in_registry("docker.io/team/model")) == "docker.io/team/model"


def test_credentials_come_from_helpers_variables_and_files(guarded, docker_home, tmp_path, monkeypatch):
    helper = tmp_path / "bin" / "docker-credential-test"
    helper.parent.mkdir()
    told = json.dumps({"ServerURL": guarded.host, "Username": USER, "Secret": PASSWORD})
    helper.write_text(
        f'#!/bin/sh\n[ "$1" = get ] || exit 2\nread -r host\necho "$host" >> {tmp_path}/asked\n'
        f"[ \"$host\" = {guarded.host} ] || {{ echo 'credentials not found in native keychain'; exit 1; }}\n"
        f"cat <<'END'\n{told}\nEND\n"
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:/usr/bin:/bin")
    config = docker_home / "config.json"
    for stored in ({"credHelpers": {guarded.host: "test"}}, {"credsStore": "test", "auths": {guarded.host: {}}}):
        config.write_text(json.dumps(stored))
        with Registry(guarded.host, policy=QUICK) as registry:
            assert not registry.has_blob("any", DIGEST)
        assert Credentials.load().login("other.example.com") is None
    Credentials.load().login("docker.io", "library/alpine")
    assert HUB_KEY in (tmp_path / "asked").read_text().splitlines()
    config.write_text("{}")
    both = json.dumps({"auths": {guarded.host: auth_of(USER, PASSWORD)}})
    (tmp_path / "auth.json").write_text(both)
    for name, value in (("DOCKER_AUTH_CONFIG", both), ("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert Credentials.load().login(guarded.host) == Login(USER, PASSWORD)
            assert PASSWORD not in repr(Credentials.load()) + repr(Credentials.load().login(guarded.host))
    with docker_config(guarded.host, Login(USER, PASSWORD)) as home:
        assert home.stat().st_mode & 0o77 == 0 and (home / "config.json").stat().st_mode & 0o77 == 0
    assert not home.exists()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ('{"auths": {"HOST": {"auth": "!secret!"}}}', "not user:password in base64"),
        ('{"auths": {"HOST": {"auth": "é"}}}', "not user:password in base64"),
        ('{"credsStore": "../../bin/sh"}', "not the name of a credential helper"),
        ('{"credsStore": "of-nobody"}', "not on PATH"),
        ('{"credsStore": "broken"}', "failed"),
    ],
)
def test_a_broken_configuration_ends_with_2_and_is_not_shown(text, what, docker_home, tmp_path, monkeypatch):
    broken = tmp_path / "docker-credential-broken"
    broken.write_text("#!/bin/sh\necho secret\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (docker_home / "config.json").write_text(text.replace("HOST", "registry.example.com"))
    with pytest.raises(UsageError, match=re.escape(what)) as caught:
        Credentials.load().login("registry.example.com")
    assert caught.value.exit_code == Exit.USAGE
    assert "secret" not in str(caught.value) + "".join(caught.value.details)


# A real registry


def test_a_password_is_wanted_found_and_wrong(guarded, docker_home):
    with Registry(guarded.host, policy=QUICK) as registry, pytest.raises(RegistryError, match="wants a password"):
        registry.has_blob("any", DIGEST)
    config = docker_home / "config.json"
    namespace = {f"{guarded.host}/guarded": auth_of(USER, PASSWORD), guarded.host: auth_of(USER, "wrong-" + PASSWORD)}
    config.write_text(json.dumps({"auths": namespace}))
    with Registry(guarded.host, policy=QUICK) as registry:
        digest = image(registry, "guarded/one")
        assert registry.resolve("guarded/one", "one") == digest
        with pytest.raises(RegistryError) as caught:
            registry.resolve("elsewhere/one", "one")
    assert PASSWORD not in str(caught.value) + caught.value.hint + repr(caught.value.details)


def test_tls_with_an_authority_of_ones_own(secured, trusted):
    with Registry(secured.host, NOBODY, QUICK) as registry:
        digest = image(registry, "secured/one")
        assert registry.resolve("secured/one", "one") == digest


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_tls_by_a_variable_and_without_any(secured, variable, monkeypatch, tmp_path):
    from pipeline.registry import http

    monkeypatch.setattr(http, "is_plain", lambda host: False)  # as every registry that is not on the loopback
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    with Registry(secured.host, NOBODY, QUICK) as registry, pytest.raises(RegistryError, match="not trusted") as caught:
        registry.resolve("any", "one")
    assert "certs.d" in caught.value.hint and caught.value.exit_code == Exit.PUBLISH
    monkeypatch.setenv(variable, str(secured.ca))
    with Registry(secured.host, NOBODY, QUICK) as registry:
        assert registry.resolve("any", "one") is None
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none"))
    with pytest.raises(UsageError):
        Registry(secured.host, NOBODY, QUICK)


def test_plain_http_where_tls_is_awaited_says_so(plain, monkeypatch):
    from pipeline.registry import http

    monkeypatch.setattr(http, "is_plain", lambda host: False)
    with Registry(plain.host, NOBODY, QUICK) as registry, pytest.raises(RegistryError, match="does not speak TLS"):
        registry.resolve("any", "one")


# Names


@pytest.mark.parametrize(
    "text",
    ["", "/", "a//b", "A/b", "host:5000/", "a:", "a:b:c", "a@sha256:12", "a@md5:00", "a b", "-a/b.c/x:..", "a/b:" + "x" * 129,
     "h.example/" + "a" * 250, "user:pass@host.example/a", "https://host.example/a", "a\n"],
)  # fmt: skip
def test_bad_references_end_with_2(text):
    with pytest.raises(UsageError) as caught:
        Reference.parse(text)
    assert caught.value.exit_code == Exit.USAGE and caught.value.hint


@pytest.mark.parametrize("text", [
    "127.0.0.1:5000/a/b:one", "localhost/a", f"registry.example.com/a:v1@{DIGEST}", "tuned/tiny:tp2", "[::1]:5000/a",
])  # fmt: skip
def test_references_are_read_and_written_back(text):
    assert str(Reference.parse(text)) == text


def test_loopback_is_what_docker_takes_for_it():
    assert all(map(is_loopback, ("localhost", "localhost:1", "127.0.0.1:5000", "127.9.9.9", "[::1]:5000", "[::1]")))
    others = ("localhost.example.com", "128.0.0.1", "10.0.0.1:5000", "registry.example.com:5000")
    assert not any(map(is_loopback, others))
