"""A web server that encrypts, nginx: `just test-nginx`. `NGINX_PROGRAM` names its program."""

from __future__ import annotations

import gzip
import os
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import hoistway
import pytest
from conftest import run, write_model
from hoistway import errors
from server_conformance import assert_loads_are_those_of_disk

# Not `NGINX`, which is what nginx itself reads: its listening sockets.
NGINX = os.environ.get("NGINX_PROGRAM")
CONFIGURATION = """
daemon off;
user root;
worker_processes 2;
error_log {folder}/error.log;
pid {folder}/nginx.pid;
events {{}}
http {{
    log_format requests '$connection $server_protocol $ssl_protocol';
    access_log {folder}/access.log requests;
    client_body_temp_path {folder}/temporary;
    proxy_temp_path {folder}/temporary;
    fastcgi_temp_path {folder}/temporary;
    uwsgi_temp_path {folder}/temporary;
    scgi_temp_path {folder}/temporary;
    limit_conn_zone $binary_remote_addr zone=each:1m;
    server {{
        listen 127.0.0.1:{port} ssl http2;
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_certificate {folder}/server.pem;
        ssl_certificate_key {folder}/server.key;
        root {folder}/root;
        location /compressing/ {{ gzip on; gzip_types *; gzip_min_length 1; }}
        location /compressed/ {{ gzip_static always; }}
        location /whole/ {{ max_ranges 0; }}
        location /without-etags/ {{ etag off; }}
        location /brief/ {{ keepalive_requests 2; }}
        location /few/ {{ limit_conn each 2; limit_rate 20m; }}
        location /denied/ {{ deny all; }}
    }}
}}
"""

pytestmark = pytest.mark.skipif(NGINX is None, reason="NGINX_PROGRAM does not name the program nginx")


class Request(NamedTuple):
    """A line of the log."""

    connection: str
    protocol: str
    encryption: str


class Server(NamedTuple):
    """A running nginx."""

    url: str
    """Of its files; ends with a slash."""
    root: Path
    log: Path
    authority: Path
    """The certificate that it is trusted by."""


def certify(folder: Path, name: str, options: str = "") -> Path:
    """Makes a certificate and its key."""
    options += f" -x509 -nodes -days 2 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -subj /CN={name}"
    command = ["openssl", "req", *options.split(), "-out", f"{name}.pem", "-keyout", f"{name}.key"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / f"{name}.pem"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An nginx that this process trusts: a process reads certificates once."""
    assert NGINX is not None
    folder = tmp_path_factory.mktemp("nginx")
    (folder / "root").mkdir()
    authority = certify(folder, "authority")
    signed = "-CA authority.pem -CAkey authority.key -addext basicConstraints=CA:FALSE"
    certify(folder, "server", f"{signed} -addext subjectAltName=IP:127.0.0.1")
    configuration = folder / "nginx.conf"
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as listening:
        patch.setenv("SSL_CERT_FILE", str(authority))
        patch.setenv("no_proxy", "*")
        # As from an nginx that it replaces, it takes over a socket that listens already: the port is its own.
        patch.setenv("NGINX", f"{listening.fileno()};")
        port = listening.getsockname()[1]
        configuration.write_text(CONFIGURATION.format(folder=folder, port=port))
        command = [NGINX, "-p", folder, "-c", configuration]
        with subprocess.Popen(command, pass_fds=[listening.fileno()]) as process:
            listening.close()
            yield Server(f"https://127.0.0.1:{port}/", folder / "root", folder / "access.log", authority)
            process.terminate()


def put(server: Server, name: str, data: bytes) -> str:
    """Writes or replaces a file; its URL."""
    path = server.root / name
    path.parent.mkdir(exist_ok=True)
    path.with_name("new").write_bytes(data)
    path.with_name("new").rename(path)
    return f"{server.url}{name}"


def load(url: str, **options: Any) -> dict[str, bytes]:
    """The bytes of the tensors."""
    loaded = hoistway.load_file(url, framework="raw", **options)
    return {name: tensor.tobytes() for name, tensor in loaded.items()}


def requests(server: Server) -> list[Request]:
    """Those that the server has answered. A line may come later than the answer."""
    return [Request(*line.split()) for line in server.log.read_text().splitlines()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 4 MB: its data do not come with the header."""
    return write_model(tmp_path / "model.safetensors", {"a": ("F32", [1000, 1003]), "b": ("U8", [5])})


def test_loads_are_those_of_disk(tmp_path: Path, server: Server) -> None:
    assert_loads_are_those_of_disk(tmp_path / "corpus", partial(put, server), server.url, {})
    found = requests(server)
    # The server would speak HTTP/2 too.
    assert {(request.protocol, request.encryption) for request in found} == {("HTTP/1.1", "TLSv1.3")}
    assert 10 * len({request.connection for request in found}) < len(found), "connections are not kept"


@pytest.mark.parametrize("place", ["compressing", "brief"])
def test_servers_that_compress_or_close_connections_give_the_same(
    server: Server, model: Path, place: str
) -> None:
    put(server, f"{place}/model.safetensors", model.read_bytes())
    for _ in range(5):
        assert load(f"{server.url}{place}/") == load(str(model))


def test_a_server_that_refuses_a_third_connection_gives_the_same(server: Server, tmp_path: Path) -> None:
    path = write_model(tmp_path / "large.safetensors", {name: ("U8", [8 << 20]) for name in "abcde"})
    url = put(server, "few/large.safetensors", path.read_bytes())
    is_same = load(url) == load(str(path))
    assert is_same


def test_a_server_of_another_authority_or_name_is_refused(
    tmp_path: Path, server: Server, model: Path
) -> None:
    put(server, "model.safetensors", model.read_bytes())
    url = f"{server.url}model.safetensors"
    script = "import hoistway, sys; hoistway.load_file(sys.argv[1], framework='raw')"
    for authority, reached, problem in (
        (server.authority, url, None),
        (server.authority, url.replace("127.0.0.1", "localhost"), 'not valid for name "localhost"'),
        (certify(tmp_path, "other"), url, "UnknownIssuer"),
    ):
        done = run(script, reached, SSL_CERT_FILE=str(authority))
        assert (done.returncode == 0) == (problem is None), done.stderr
        assert problem is None or (problem in done.stderr and "StorageError" in done.stderr)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_file_that_is_replaced_or_removed_during_a_load_is_noticed(
    server: Server, model: Path, *, is_gone: bool
) -> None:
    url = put(server, "changing.safetensors", model.read_bytes())
    with hoistway.open(url, framework="raw") as checkpoint:
        assert checkpoint.get_tensor("b").tobytes() == load(str(model))["b"]
        if is_gone:
            (server.root / "changing.safetensors").unlink()
        else:
            put(server, "changing.safetensors", model.read_bytes()[::-1])
            # The ETag has the time in seconds.
            os.utime(server.root / "changing.safetensors", (0, 0))
        # The server itself refuses to send bytes of another version, as `If-Match` says.
        with pytest.raises(errors.FileChangedError, match="404" if is_gone else "412") as caught:
            checkpoint.get_tensor("a")
    assert caught.value.tensor == "a"


@pytest.mark.parametrize(
    ("place", "error", "problem"),
    [
        ("whole", errors.StorageError, "status 200 for a range"),
        ("compressed", errors.StorageError, "status 200 for a range"),
        ("without-etags", errors.StorageError, "no strong ETag"),
        ("denied", PermissionError, "denies access"),
    ],
)
def test_other_answers_are_refused(
    server: Server, model: Path, place: str, error: type[Exception], problem: str
) -> None:
    url = put(server, f"{place}/model.safetensors", model.read_bytes())
    put(server, f"{place}/model.safetensors.gz", gzip.compress(model.read_bytes()))
    with pytest.raises(error, match=f"{url}: .*{problem}"):
        load(url)


def test_what_is_refused_of_large_files_only_or_unless_asked_for(server: Server, model: Path) -> None:
    url = put(server, "without-etags/model.safetensors", model.read_bytes())
    assert load(url, store={"unpinned": True}) == load(str(model))
    small = write_model(model.with_name("small.safetensors"), {"a": ("U8", [5])})
    assert load(put(server, "whole/small.safetensors", small.read_bytes())) == load(str(small))
    put(server, "compressed/small.safetensors.gz", gzip.compress(small.read_bytes()))
    with pytest.raises(errors.StorageError, match="Content-Encoding 'gzip'"):
        load(f"{server.url}compressed/small.safetensors")
