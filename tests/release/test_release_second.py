"""Against other registries: a second implementation that keeps referrers itself, and token servers (a stand-in)."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import cache_samples
import pytest
import release_debian
import release_samples as samples
from release_registries import PASSWORD, USER, Running, auth_of, await_port, command
from test_release_registry import NOBODY, QUICK, attached, image
from test_release_trust import everything

from pipeline.contract.exits import Exit
from pipeline.release import errors
from pipeline.release.credentials import Credentials
from pipeline.release.referrers import list_tag
from pipeline.release.registry import Registry
from pipeline.release.seal import seal
from pipeline.release.sign import Signer
from pipeline.tune.ports import free_port


@pytest.fixture(scope="module")
def second(programs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("second")
    program = release_debian.second_registry(folder)
    port, log = free_port(), folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([str(program), f"127.0.0.1:{port}"], stdout=out, stderr=subprocess.STDOUT)
    try:
        await_port(port, process, log)
        yield Running(f"127.0.0.1:{port}", folder / "none", log)
    finally:
        process.terminate()
        process.wait(120)


def test_a_registry_that_keeps_referrers_itself(second, pipeline, tmp_path, monkeypatch):
    monkeypatch.setenv("COSIGN_PASSWORD", samples.KEY_PASSWORD)
    private, public = samples.key_pair(tmp_path / "keys")
    with Registry(second.host, NOBODY, QUICK) as registry:
        assert registry.tags("second/none") == () and registry.manifest("second/none", "x") is None
        digest = image(registry, "second/one")
        assert registry.resolve("second/one", "one") == digest
        subject = registry.manifest("second/one", "one").descriptor()
        made = {attached(registry, "second/one", subject, f"application/vnd.test.{n}") for n in (1, 2)}
        assert {one.digest for one in registry.referrers("second/one", digest)} == made
        only = registry.referrers("second/one", digest, "application/vnd.test.2")
        assert len(only) == 1 and only[0].artifact_type == "application/vnd.test.2"
        sample = samples.push(registry, "second/trust", tmp_path)
        seal(registry, sample.reference, everything(sample), Signer(str(private)))
        seal(registry, sample.reference, everything(sample), Signer(str(private)))
        assert len(registry.referrers("second/trust", sample.reference.digest)) == 3
    done = pipeline("attest", "verify", sample.reference, "--key", public)
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(command("oras", "discover", "--plain-http", "--format", "json", str(sample.reference)))
    assert len(told["manifests"]) == 3
    cache_samples.write(tmp_path / "root", "NVIDIA H200")
    name = f"oci://{second.host}/second/caches:one"
    assert pipeline("cache", "push", tmp_path / "root", name).returncode == 0
    assert pipeline("cache", "pull", name, tmp_path / "back").returncode == 0
    assert pipeline("cache", "diff", tmp_path / "root", tmp_path / "back").returncode == 0


class Tokens(ThreadingHTTPServer):
    """A registry's front: wants a token for each scope and lists referrers in two pages; and its token server."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], str]] = []
        self.granted: dict[str, str] = {}
        self.realm = ""
        super().__init__(("127.0.0.1", 0), TokenHandler)
        self.host = f"127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return super().__enter__()

    def __exit__(self, *args):
        self.shutdown()
        super().__exit__(*args)


ENTRY = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "size": 3, "artifactType": "application/vnd.test"}


class TokenHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Tokens

    def log_message(self, format, *args):
        pass

    def say(self, status, value, **headers):
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body)

    def token(self, form, authorization):
        self.server.asked.append((self.path.split("?")[0], form, authorization))
        right = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if authorization != right and form.get("refresh_token") != PASSWORD:
            return self.say(401, {"errors": [{"code": "UNAUTHORIZED", "message": "who?"}]})
        name = f"token-{len(self.server.granted)}"
        self.server.granted[name] = form["scope"]
        return self.say(200, {"access_token" if "refresh_token" in form else "token": name})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.token(dict(urllib.parse.parse_qsl(body)), self.headers.get("Authorization", ""))

    def do_GET(self):
        place = urllib.parse.urlsplit(self.path)
        if place.path == "/token":
            return self.token(dict(urllib.parse.parse_qsl(place.query)), self.headers.get("Authorization", ""))
        scope = "repository:some/where:pull"
        if self.server.granted.get(self.headers.get("Authorization", "").removeprefix("Bearer ")) != scope:
            realm = self.server.realm or f"http://{self.server.host}/token"
            return self.say(401, {}, WWW_Authenticate=f'Bearer realm="{realm}",service="test",scope="{scope}"')
        if "page=2" in place.query:
            return self.say(200, {"manifests": [ENTRY | {"digest": "sha256:" + "2" * 64}]})
        link = f'<{place.path}?page=2>; rel="next"'
        return self.say(200, {"manifests": [ENTRY | {"digest": "sha256:" + "1" * 64}]}, Link=link)


def login(host, **entry):
    return Credentials((("test", {"auths": {host: entry}}),))


def test_tokens_are_fetched_once_for_each_scope_and_pages_are_followed():
    subject = "sha256:" + "0" * 64
    with Tokens() as server, Registry(server.host, login(server.host, **auth_of(USER, PASSWORD)), QUICK) as registry:
        found = registry.referrers("some/where", subject)
        assert [one.digest[-1] for one in found] == ["1", "2"]
        registry.referrers("some/where", subject)
        assert len(server.asked) == 1
        assert server.asked[0][1] == {"service": "test", "scope": "repository:some/where:pull"}
        assert list_tag(subject) == "sha256-" + "0" * 64
    with Tokens() as server, Registry(server.host, login(server.host, identitytoken=PASSWORD), QUICK) as registry:
        registry.referrers("some/where", subject)
        assert server.asked[0][1]["grant_type"] == "refresh_token"
    for credentials in (NOBODY, login("127.0.0.1:1", **auth_of(USER, "wrong"))):
        with Tokens() as server, Registry(server.host, credentials, QUICK) as registry:
            with pytest.raises(errors.Unauthorized) as caught:
                registry.referrers("some/where", subject)
            assert caught.value.exit_code == Exit.PUBLISH


@pytest.mark.parametrize("realm", ["http://tokens.example.com/token", "ftp://x/", "nonsense", ""])
def test_a_password_is_never_sent_unencrypted(realm):
    with Tokens() as server, Registry(server.host, login(server.host, **auth_of(USER, PASSWORD)), QUICK) as registry:
        server.realm = realm or "http://[bad"
        with pytest.raises(errors.AnswerInvalid):
            registry.tags("some/where")
        assert server.asked == []
