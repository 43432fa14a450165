"""The guarded fetcher over the web: real servers on loopback, some of them hostile."""

from __future__ import annotations

import asyncio
import functools
import gzip
import ipaddress
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp import web

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.fetch import Fetcher
from encoder_svc.media.fetch_policy import FetchPolicy
from encoder_svc.media.host_names import SystemResolver
from encoder_svc.media.http_download import open_checked_socket
from tests.media.web_servers import Authority, Names, WebServer, local_policy, raw_server, web_server
from tests.waiting import PATIENCE_SECONDS, eventually


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with web_server() as served:
        yield served


async def refused(
    uri: str,
    policy: FetchPolicy,
    names: Names | None = None,
    limit: int | None = None,
    authority: Authority | None = None,
) -> ServiceError:
    """The error of a fetch that must fail, checked to tell nothing that it should not."""
    tls = authority.client() if authority else None
    async with Fetcher(policy, names, tls=tls) as fetcher:
        with pytest.raises(ServiceError) as failed:
            await fetcher.fetch(uri, limit)
    error = failed.value
    assert error.__cause__ is None
    for secret in ("127.0.0", "10.9.8.7", "secret", "/path"):
        assert secret not in error.message
    return error


async def test_a_file_comes_as_it_is(server: WebServer) -> None:
    body = bytes(range(256)) * 8192  # 2 MiB: in many pieces, joined in a thread
    uri = server.serve("/cat.jpg", body)
    async with Fetcher(local_policy(server.port)) as fetcher:
        assert await fetcher.fetch(uri) == body
        assert await fetcher.fetch(uri, limit_bytes=len(body)) == body
    for request in server.requests:
        assert request.headers["Accept-Encoding"] == "identity"
        assert set(request.headers) == {"Host", "User-Agent", "Accept", "Accept-Encoding", "Connection"}
        assert request.headers["Connection"] == "close"


async def test_an_empty_file_is_fetched(server: WebServer) -> None:
    async with Fetcher(local_policy(server.port)) as fetcher:
        assert await fetcher.fetch(server.serve("/", b"")) == b""


async def test_a_file_in_pieces_of_all_sizes_comes_whole() -> None:
    pieces = [bytes([number % 256]) * size for number, size in enumerate([1] * 3000 + [200_000, 1, 5000, 90_000, 3])]

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in [*pieces, b""]:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()

    async with raw_server(script) as port, Fetcher(local_policy(port)) as fetcher:
        assert await fetcher.fetch(f"http://127.0.0.1:{port}/") == b"".join(pieces)


async def test_path_and_query_are_sent_as_written_and_the_fragment_is_not(server: WebServer) -> None:
    server.serve("/a/b", b"x")
    written = "/a%2fb?X-Sig=a%2Fb%3D%2b+c&u=%7e"
    async with Fetcher(local_policy(server.port)) as fetcher:
        assert await fetcher.fetch(server.url(written) + "#page=2") == b"x"
    assert server.requests[0].raw_path == written


async def test_f19_nothing_but_data_is_fetched_unless_it_is_allowed(server: WebServer) -> None:
    for uri in (
        "https://example.com/path",
        server.serve("/path", b"x"),
        "file:///etc/path",
        "ftp://h/path",
        "GOPHER://h/",
    ):
        error = await refused(uri, FetchPolicy())
        assert error.reason is Reason.URI_FORBIDDEN
        assert "fetch_schemes" in error.message
    assert server.requests == []


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "0x7f000001", "127.0.0.1.", "１２７.０.０.１",
        "127。0。0。1", "0.0.0.0", "0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]", "localhost", "LOCALHOST.", "10.0.0.7", "172.31.255.255", "192.168.1.1", "169.254.169.254",
        "100.64.0.1", "[fe80::1]", "[fe80::1%25lo]", "[fd00:ec2::254]", "224.0.0.1", "255.255.255.255", "168.63.129.16",
    ],
)  # fmt: skip
async def test_f19_no_spelling_of_a_private_address_is_connected_to(host: str, server: WebServer) -> None:
    server.serve("/path", b"x")
    policy = local_policy(server.port, allow_private=())
    error = await refused(f"http://{host}:{server.port}/path", policy)
    assert error.reason is Reason.URI_FORBIDDEN
    assert "fetch_private_networks" in error.message
    assert server.requests == []


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "[::ffff:127.0.0.1]"])
async def test_f19_odd_spellings_mean_to_the_check_what_they_mean_to_the_socket(host: str, server: WebServer) -> None:
    server.serve("/", b"x")
    async with Fetcher(local_policy(server.port)) as fetcher:
        assert await fetcher.fetch(f"http://{host}:{server.port}/") == b"x"
    assert server.requests[0].host == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    "addresses",
    [["10.0.0.1"], ["93.184.215.14", "127.0.0.1"], ["::ffff:10.0.0.1"], ["fe80::1%1"], ["64:ff9b::a00:1"], ["::1"]],
)
async def test_f19_a_name_with_a_private_address_is_refused(addresses: list[str], server: WebServer) -> None:
    names = Names(cdn_test=[addresses])
    policy = local_policy(server.port, allow_private=())
    error = await refused(f"http://cdn.test:{server.port}/path", policy, names)
    assert error.reason is Reason.URI_FORBIDDEN
    assert server.requests == []


async def test_f19_a_name_is_looked_up_once_and_its_checked_address_is_used(server: WebServer) -> None:
    # After the check the name moves to an address that is not allowed, where the same port answers.
    async with web_server("127.0.0.2") as inner:
        server.serve("/", b"outer")
        policy = local_policy(server.port, inner.port, allow_private=(ipaddress.ip_network("127.0.0.1/32"),))
        names = Names(rebind_test=[["127.0.0.1"], ["127.0.0.2"]])
        async with Fetcher(policy, names) as fetcher:
            assert await fetcher.fetch(server.url("/", "rebind.test")) == b"outer"
        assert names.asked == ["rebind.test"]
        assert server.requests[0].host == f"rebind.test:{server.port}"
        error = await refused(inner.url("/path", "rebind.test"), policy, names)
        assert error.reason is Reason.URI_FORBIDDEN
        assert inner.requests == []


async def test_f19_a_name_that_moves_between_two_hops_is_checked_again(server: WebServer) -> None:
    names = Names(rebind_test=[["127.0.0.1"], ["127.0.0.2"]])
    policy = local_policy(server.port, allow_private=(ipaddress.ip_network("127.0.0.1/32"),))
    server.redirect("/first", "/second")
    error = await refused(server.url("/first", "rebind.test"), policy, names)
    assert error.reason is Reason.URI_FORBIDDEN
    assert names.asked == ["rebind.test", "rebind.test"]
    assert [request.path for request in server.requests] == ["/first"]


async def test_f19_the_last_gate_stands_between_the_http_client_and_the_socket(server: WebServer) -> None:
    # The same client without our checks before it: a numeric host, which no resolver sees.
    factory = functools.partial(open_checked_socket, FetchPolicy())
    connector = aiohttp.TCPConnector(socket_factory=factory)
    async with aiohttp.ClientSession(connector=connector) as session:
        with pytest.raises(ServiceError) as failed:
            await session.get(server.serve("/", b"x"))
    assert failed.value.reason is Reason.URI_FORBIDDEN
    assert server.requests == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(status: int, server: WebServer) -> None:
    server.redirect("/a", "/b?x=%2f#part", status)
    server.redirect("/b", server.url("/c"), status)
    server.redirect("/c", f"//127.0.0.1:{server.port}/d", status)
    server.serve("/d", b"there")
    async with Fetcher(local_policy(server.port)) as fetcher:
        assert await fetcher.fetch(server.url("/a")) == b"there"
    assert [request.raw_path for request in server.requests] == ["/a", "/b?x=%2f", "/c", "/d"]
    # Cookies are not kept, and nobody is told where we came from.
    assert not any({"Cookie", "Referer"} & set(request.headers) for request in server.requests)


async def test_f19_at_most_three_redirects(server: WebServer) -> None:
    server.redirect("/loop", "/loop")
    error = await refused(server.url("/loop"), local_policy(server.port))
    assert error.reason is Reason.FETCH_REFUSED
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("http://169.254.169.254/latest/path", Reason.URI_FORBIDDEN),
        ("http://10.0.0.1/path", Reason.URI_FORBIDDEN),
        ("http://[::ffff:a00:1]/path", Reason.URI_FORBIDDEN),
        ("http://2130706433:1/path", Reason.URI_FORBIDDEN),
        ("file:///etc/path", Reason.URI_FORBIDDEN),
        ("data:,path", Reason.URI_FORBIDDEN),
        ("ftp://127.0.0.1/path", Reason.URI_FORBIDDEN),
        ("http://other.test/path", Reason.URI_FORBIDDEN),
        ("http://user:secret@127.0.0.1/path", Reason.URI_FORBIDDEN),
        ("http://127.0.0.1:22/path", Reason.URI_FORBIDDEN),
        ("https://127.0.0.1/path", Reason.URI_FORBIDDEN),
        ("http://[::1/path", Reason.FETCH_REFUSED),
        ("", Reason.FETCH_REFUSED),
        ("/with blank", Reason.REQUEST_INVALID),
        ("http://127.0.0.1\\@other.test/", Reason.FETCH_REFUSED),
    ],
)
async def test_f19_every_hop_is_checked_like_the_first(
    target: str, reason: Reason, server: WebServer, tmp_path: Path
) -> None:
    server.redirect("/first", target)
    policy = local_policy(
        server.port, 80, 443, schemes=frozenset({"data", "http", "file"}), roots=(tmp_path,), hosts=("127.0.0.1",)
    )
    assert (await refused(server.url("/first"), policy)).reason is reason
    assert len(server.requests) == 1


async def test_f19_hosts_can_be_limited(server: WebServer) -> None:
    server.serve("/path", b"x")
    names = Names(a_media_test=[["127.0.0.1"]], media_test=[["127.0.0.1"]], xmedia_test=[["127.0.0.1"]])
    policy = local_policy(server.port, hosts=("*.media.test",))
    async with Fetcher(policy, names) as fetcher:
        assert await fetcher.fetch(server.url("/path", "A.media.test.")) == b"x"
    for host in ("media.test", "xmedia.test", "127.0.0.1", "a.media.test.evil.test"):
        error = await refused(server.url("/path", host), policy, names)
        assert error.reason is Reason.URI_FORBIDDEN
        assert "fetch_hosts" in error.message
    assert len(server.requests) == 1


async def test_f19_ports_are_limited(server: WebServer) -> None:
    error = await refused(server.serve("/path", b"x"), local_policy(80, 443))
    assert error.reason is Reason.URI_FORBIDDEN
    assert "fetch_ports" in error.message
    assert server.requests == []


@pytest.mark.parametrize("user", ["user:secret@", "user@", ":@", "@", "a@b@"])
async def test_f19_credentials_in_addresses_are_refused(user: str, server: WebServer) -> None:
    error = await refused(f"http://{user}127.0.0.1:{server.port}/path", local_policy(server.port))
    assert error.reason is Reason.URI_FORBIDDEN
    assert server.requests == []


@pytest.mark.parametrize(
    "uri",
    [
        "", "path", "//h/path", "http:", "http:/path", "http:///path", "http://:80/path", "http://h:port/", "http://h:99999/",
        "http://[::1/", "http://%31%32%37.0.0.1/", "http://a..b/", "http://a b/", " http://h/",
        "http://h/\r\nHost: x", "http://h\\@x/", "http://h/\0", "http://[v1.x]/", "https://h/" + "a" * 9000,
    ],
)  # fmt: skip
async def test_what_is_no_address_is_refused(uri: str) -> None:
    reason = (await refused(uri, local_policy(80, 443, schemes=frozenset({"https", "http"})))).reason
    assert reason is (Reason.URI_FORBIDDEN if uri.startswith(" ") else Reason.REQUEST_INVALID)


async def test_f19_proxies_of_the_environment_are_not_used(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password secret\n")
    async with web_server() as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url(""))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.setenv("NETRC", str(netrc))
        uri = server.serve("/", b"direct")
        async with Fetcher(local_policy(server.port)) as fetcher:
            assert await fetcher.fetch(uri) == b"direct"
        assert proxy.requests == []
        assert "Authorization" not in server.requests[0].headers
        # That the environment would lead others to the proxy: else this test shows nothing.
        async with aiohttp.ClientSession(trust_env=True) as session, session.get(uri):
            assert len(proxy.requests) == 1


async def test_f20_a_length_above_the_limit_is_refused_before_the_body() -> None:
    read = asyncio.Event()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")
        await read.wait()  # The body never comes: who waits for it hangs.

    async with raw_server(script) as port:
        error = await refused(f"http://127.0.0.1:{port}/path", local_policy(port), limit=1000)
    assert error.reason is Reason.FETCH_TOO_LARGE


@pytest.mark.parametrize("chunked", [False, True])
async def test_f20_an_endless_body_is_cut_at_the_limit(chunked: bool) -> None:
    sent = 0
    broken = asyncio.Event()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n" + (b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"\r\n"))
        piece = bytes(1 << 16)
        try:
            while True:
                writer.write(b"10000\r\n" + piece + b"\r\n" if chunked else piece)
                await writer.drain()
                sent += len(piece)
        finally:
            broken.set()

    async with raw_server(script) as port:
        error = await refused(f"http://127.0.0.1:{port}/path", local_policy(port), limit=1 << 20)
        await asyncio.wait_for(broken.wait(), PATIENCE_SECONDS)
    assert error.reason is Reason.FETCH_TOO_LARGE
    assert "1048576" in error.message
    # Beyond the limit only what stood in the buffers of the sockets.
    assert sent < 64 << 20


async def test_f20_the_body_may_have_exactly_the_limit_and_not_one_byte_more(server: WebServer) -> None:
    async def stream(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(bytes(1001))
        return response

    server.pages["/path"] = stream
    async with Fetcher(local_policy(server.port, max_bytes=1001)) as fetcher:
        assert len(await fetcher.fetch(server.url("/path"), limit_bytes=10_000)) == 1001
    error = await refused(server.url("/path"), local_policy(server.port), limit=1000)
    assert error.reason is Reason.FETCH_TOO_LARGE


async def test_f20_a_compressed_body_is_not_expanded(server: WebServer) -> None:
    uri = server.serve("/bomb", gzip.compress(bytes(1 << 20)), Content_Encoding="gzip")
    error = await refused(uri, local_policy(server.port))
    assert error.reason is Reason.FETCH_REFUSED
    assert "compressed" in error.message


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", Reason.FETCH_FAILED),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nsho", Reason.FETCH_FAILED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nsecret", Reason.FETCH_FAILED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 6\r\n\r\nsecret", Reason.FETCH_FAILED),
        (b"secret nonsense\r\n\r\n", Reason.FETCH_FAILED),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", Reason.FETCH_FAILED),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n", Reason.FETCH_FAILED),
        (b"", Reason.FETCH_FAILED),
        (b"HTTP/1.1 500 secret\r\nContent-Length: 6\r\n\r\nsecret", Reason.FETCH_FAILED),
        (b"HTTP/1.1 429 secret\r\nContent-Length: 6\r\n\r\nsecret", Reason.FETCH_FAILED),
        (b"HTTP/1.1 404 secret\r\nContent-Length: 6\r\n\r\nsecret", Reason.FETCH_REFUSED),
        (b"HTTP/1.1 204 secret\r\n\r\n", Reason.FETCH_REFUSED),
        (b"HTTP/1.1 206 secret\r\nContent-Length: 6\r\n\r\nsecret", Reason.FETCH_REFUSED),
        (b"HTTP/1.1 304 secret\r\n\r\n", Reason.FETCH_REFUSED),
        (b"HTTP/1.1 302 secret\r\n\r\n", Reason.FETCH_REFUSED),
    ],
)
async def test_f21_what_a_server_does_wrong_is_told_in_our_words(answer: bytes, reason: Reason) -> None:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    async with raw_server(script) as port:
        error = await refused(f"http://127.0.0.1:{port}/path", local_policy(port))
    assert error.reason is reason


async def test_no_connection_and_no_name_are_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        port = taken.getsockname()[1]
        error = await refused(f"http://127.0.0.1:{port}/path", local_policy(port))
        assert error.reason is Reason.FETCH_FAILED
        assert "connected" in error.message
        error = await refused(f"http://nowhere.test:{port}/path", local_policy(port), Names())
    assert error.reason is Reason.FETCH_FAILED
    assert "looked up" in error.message


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nslow"])
async def test_f19_a_silent_server_is_left(words: bytes) -> None:
    left = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        await reader.read()
        left.set()

    async with raw_server(script) as port:
        error = await refused(f"http://127.0.0.1:{port}/path", local_policy(port, idle_seconds=0.2))
        await asyncio.wait_for(left.wait(), PATIENCE_SECONDS)
    assert error.reason is Reason.FETCH_TIMEOUT


async def test_f19_a_server_that_drips_is_left_when_the_time_is_over() -> None:
    left = asyncio.Event()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            while True:  # never idle for long
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            left.set()

    async with raw_server(script) as port:
        error = await refused(f"http://127.0.0.1:{port}/path", local_policy(port, idle_seconds=5.0, max_seconds=0.5))
        await asyncio.wait_for(left.wait(), PATIENCE_SECONDS)
    assert error.reason is Reason.FETCH_TIMEOUT
    assert "fetch_seconds" in error.message


async def test_a_name_server_that_hangs_is_left() -> None:
    class Hanging(Names):
        async def resolve(self, host: str) -> list[str]:
            self.asked.append(host)
            await asyncio.get_running_loop().create_future()
            return []

    names = Hanging()
    error = await refused("http://slow.test/path", local_policy(80, connect_seconds=0.1), names)
    assert error.reason is Reason.FETCH_TIMEOUT
    assert names.asked == ["slow.test"]


async def test_f19_fetches_at_once_are_bounded_and_waiting_takes_of_the_time(server: WebServer) -> None:
    now = most = 0
    go = asyncio.Event()

    async def page(_: web.BaseRequest) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await go.wait()
        now -= 1
        return web.Response(body=b"x")

    server.pages["/path"] = page
    uri = server.url("/path")
    async with Fetcher(local_policy(server.port, max_concurrency=2)) as fetcher:
        fetches = [asyncio.create_task(fetcher.fetch(uri)) for _ in range(8)]
        await eventually(lambda: now == 2)
        # Others need no place: they are not held up.
        assert await fetcher.fetch("data:,here") == b"here"
        # One that left while it waited has taken no place with it.
        fetches.pop().cancel()
        go.set()
        assert await asyncio.gather(*fetches) == [b"x"] * 7
    assert most == 2

    go.clear()
    async with Fetcher(local_policy(server.port, max_concurrency=1, max_seconds=0.5)) as fetcher:
        results = await asyncio.gather(*(fetcher.fetch(uri) for _ in range(3)), return_exceptions=True)
    assert [getattr(result, "reason", None) for result in results] == [Reason.FETCH_TIMEOUT] * 3


async def test_f27_cancelling_closes_the_connection_and_frees_the_place(server: WebServer) -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def page(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"x")
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            left.set()
        return response

    server.pages["/"] = page
    async with Fetcher(local_policy(server.port, max_concurrency=1)) as fetcher:
        for _ in range(3):
            begun.clear()
            left.clear()
            fetch = asyncio.create_task(fetcher.fetch(server.url("/")))
            await asyncio.wait_for(begun.wait(), PATIENCE_SECONDS)
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            await asyncio.wait_for(left.wait(), PATIENCE_SECONDS)


async def test_tls_is_checked_against_the_name_though_the_connection_goes_to_the_address() -> None:
    authority, stranger = Authority(), Authority()
    async with web_server(tls=authority.server("media.test")) as server:
        server.serve("/path", b"sealed")
        names = Names(media_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])
        policy = local_policy(server.port, schemes=frozenset({"https"}))
        async with Fetcher(policy, names, tls=authority.client()) as fetcher:
            assert await fetcher.fetch(server.url("/path", "media.test")) == b"sealed"
        for host, trusted in (("other.test", authority), ("127.0.0.1", authority), ("media.test", stranger)):
            error = await refused(server.url("/path", host), policy, names, authority=trusted)
            assert error.reason is Reason.FETCH_REFUSED
            assert "certificate" in error.message
        assert len(server.requests) == 1


async def test_tls_of_strangers_is_not_trusted_by_default() -> None:
    async with web_server(tls=Authority().server("127.0.0.1")) as server:
        policy = local_policy(server.port, schemes=frozenset({"https"}))
        error = await refused(server.serve("/path", b"x"), policy)
    assert error.reason is Reason.FETCH_REFUSED


async def test_a_server_that_never_ends_the_handshake_is_left() -> None:
    async def script(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        raise AssertionError("nothing was to be read")

    # It waits for the end of an HTTP request, and reads a TLS greeting.
    async with raw_server(script) as port:
        policy = local_policy(port, schemes=frozenset({"https"}), connect_seconds=0.2)
        error = await refused(f"https://127.0.0.1:{port}/path", policy)
    assert error.reason is Reason.FETCH_TIMEOUT


async def test_a_redirect_may_lead_from_https_to_http_only_if_http_is_allowed(server: WebServer) -> None:
    authority = Authority()
    server.serve("/plain", b"plain")
    async with web_server(tls=authority.server("127.0.0.1")) as secure:
        uri = secure.redirect("/path", server.url("/plain"))
        policy = local_policy(server.port, secure.port, schemes=frozenset({"https", "http"}))
        async with Fetcher(policy, tls=authority.client()) as fetcher:
            assert await fetcher.fetch(uri) == b"plain"
        only = local_policy(server.port, secure.port, schemes=frozenset({"https"}))
        assert (await refused(uri, only, authority=authority)).reason is Reason.URI_FORBIDDEN


async def test_the_system_is_asked_for_names(server: WebServer) -> None:
    server.serve("/", b"x")
    policy = local_policy(server.port, allow_private=tuple(map(ipaddress.ip_network, ("127.0.0.0/8", "::1/128"))))
    async with Fetcher(policy) as fetcher:
        assert await fetcher.fetch(server.url("/", "localhost")) == b"x"
    resolver = SystemResolver()
    assert "127.0.0.1" in await resolver.resolve("localhost")
    await resolver.close()


def test_all_of_it_on_the_loop_that_the_front_uses() -> None:
    async def scenario() -> None:
        authority = Authority()
        async with web_server(tls=authority.server("media.test")) as server:
            server.serve("/file", bytes(1 << 20))
            names = Names(media_test=[["127.0.0.1"]], inner_test=[["10.0.0.1"]])
            policy = local_policy(server.port, schemes=frozenset({"https"}), max_concurrency=1)
            hasty = local_policy(server.port, schemes=frozenset({"https"}), max_seconds=0.5)
            begun, left = asyncio.Event(), asyncio.Event()

            async def hang(_: web.BaseRequest) -> web.Response:
                begun.set()
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    left.set()
                return web.Response()

            server.pages["/hang"] = hang
            async with Fetcher(policy, names, tls=authority.client()) as fetcher:

                async def reason(path: str, limit: int | None = None) -> Reason:
                    with pytest.raises(ServiceError) as failed:
                        await fetcher.fetch(server.url(path, "media.test"), limit)
                    return failed.value.reason

                server.redirect("/good", "/file")
                assert await fetcher.fetch(server.url("/good", "media.test")) == bytes(1 << 20)
                server.redirect("/bad", server.url("/file", "inner.test"))
                assert await reason("/bad") is Reason.URI_FORBIDDEN
                assert await reason("/file", 1000) is Reason.FETCH_TOO_LARGE
                fetch = asyncio.create_task(fetcher.fetch(server.url("/hang", "media.test")))
                await asyncio.wait_for(begun.wait(), PATIENCE_SECONDS)
                fetch.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fetch
                await asyncio.wait_for(left.wait(), PATIENCE_SECONDS)
            error = await refused(server.url("/hang", "media.test"), hasty, names, authority=authority)
            assert error.reason is Reason.FETCH_TIMEOUT

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_the_fetcher_runs_without_torch_and_codecs() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'PIL', 'simplejpeg', 'grpc')))\n"
        "import encoder_svc.media.fetch"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
