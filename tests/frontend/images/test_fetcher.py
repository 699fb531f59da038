"""Images are fetched from hosts that are named, at addresses that are public, within limits: with real servers.

Tests' servers are on this machine, whose addresses are not public. So these tests say themselves which addresses may be
reached, where one is to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from services.frontend.images.fetcher import FetchFailed, ImageFetcher, is_public
from tests.frontend.images.samples import picture

FILE = picture()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((one, True) for one in ("93.184.216.34", "2606:2800:21f:cb07::1", "64:ff9b::5db8:d822")),
        *((one, False) for one in ("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1")),
        *((one, False) for one in ("169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1")),
        *((one, False) for one in ("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1")),
        *((one, False) for one in ("::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::", "2002:a9fe:a9fe::")),
        *((one, False) for one in ("192.0.0.192", "192.0.0.8", "192.88.99.1", "168.63.129.16", "::ffff:192.0.0.192")),
        *((one, False) for one in ("64:ff9b::a83f:8110", "2002:c000:c0::", "3fff::1")),
        *((one, False) for one in ("::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b:1::a9fe:a9fe", "fec0::1", "4000::1")),
    ],
)
def test_addresses_that_are_not_of_the_internet_are_known_in_all_forms(address: str, public: bool) -> None:
    assert is_public(address) is public


class Site:
    """A web server whose answers a test sets."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[web.Request], web.StreamResponse]] = {}
        self.asked: list[str] = []
        self.port = 0
        self.resolved: list[str] = []
        self.addresses: Sequence[Sequence[str]] = [["127.0.0.1"]]
        """What each question for a name gets; the last one stays."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(str(request.rel_url))
        answer = self.answers[request.path](request)
        if request.path == "/endless":
            await answer.prepare(request)
            while True:
                await answer.write(bytes(1 << 16))
        if request.path == "/slow":
            await asyncio.Event().wait()
        return answer

    async def resolve(self, name: str, port: int) -> Sequence[str]:
        self.resolved.append(name)
        return self.addresses[min(len(self.resolved), len(self.addresses)) - 1]

    def fetcher(self, *, allows: Callable[[str], bool] = lambda _: True, time_limit_s: float = 60.0) -> ImageFetcher:
        hosts = [f"pictures.example:{self.port}", "PICTURES.example", f"other.example:{self.port}"]
        return ImageFetcher(hosts, bytes_limit=1 << 20, time_limit_s=time_limit_s, resolve=self.resolve, allows=allows)

    def url(self, path: str) -> str:
        return f"http://pictures.example:{self.port}{path}"


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    found = Site()
    app = web.Application()
    app.router.add_get("/{tail:.*}", found.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    place = web.TCPSite(runner, "127.0.0.1", 0)
    await place.start()
    found.port = runner.addresses[0][1]
    try:
        yield found
    finally:
        await runner.cleanup()


async def test_a_file_is_fetched_also_over_redirects_each_of_which_is_checked_again() -> None:
    async with site() as there:
        there.answers["/a"] = lambda _: web.Response(body=FILE, content_type="image/png")
        there.answers["/b"] = lambda _: web.Response(status=302, headers={"Location": "/a"})
        there.answers["/c"] = lambda _: web.Response(
            status=307, headers={"Location": f"http://other.example:{there.port}/b"}
        )
        assert await there.fetcher().fetch(there.url("/c")) == (FILE, "image/png")
        assert there.resolved == ["pictures.example", "other.example", "other.example"]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1/x", "is at 127.0.0.1, which images.hosts does not name; send its data"),
        ("http://169.254.169.254/latest/meta-data", "is at 169.254.169.254, which images.hosts does not name"),
        ("http://pictures.example:1/x", "is at pictures.example:1, which"),
        ("http://[::1]/x", "is at ::1, which"),
        ("http://pictures.example.evil.example/x", "which images.hosts does not name"),
        ("http://pictures.example@127.0.0.1/x", "user's name"),
        ("http://u:p@pictures.example/x", "user's name"),
        ("ftp://pictures.example/x", "neither http, https nor data"),
        ("file:///etc/passwd", "neither http, https nor data"),
        ("x", "neither http, https nor data"),
        ("http://pictures.example:99999/", "no URL that can be read"),
    ],
)
async def test_a_url_of_another_host_is_not_asked(url: str, why: str) -> None:
    with pytest.raises(FetchFailed) as failed:
        await Site().fetcher().fetch(url)
    assert why in str(failed.value)


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.8", "::1"])
async def test_a_name_with_an_address_that_is_not_public_is_not_asked(address: str) -> None:
    async with site() as there:
        there.addresses = [["93.184.216.34", address]]
        with pytest.raises(FetchFailed, match=f"has the address {address}, and that is not public"):
            await there.fetcher(allows=is_public).fetch(there.url("/a"))
        assert not there.asked


async def test_the_address_that_was_checked_is_the_one_that_is_asked_whatever_the_name_means_a_moment_later() -> None:
    async with site() as there:
        there.addresses = [["127.0.0.1"], ["127.0.0.2"]]  # here the second is the one that may not be reached
        there.answers["/a"] = lambda _: web.Response(body=FILE)
        fetcher = there.fetcher(allows=lambda address: address == "127.0.0.1")
        assert (await fetcher.fetch(there.url("/a")))[0] == FILE
        assert there.resolved == ["pictures.example"], "the name is looked up once, and not again to connect"
        with pytest.raises(FetchFailed, match=r"127\.0\.0\.2, and that is not public"):
            await fetcher.fetch(there.url("/a"))
        assert there.asked == ["/a"]


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("http://127.0.0.1/x", "images.hosts does not name"),
        ("http://169.254.169.254/latest/meta-data", "is at 169.254.169.254, which images.hosts does not name"),
        ("//169.254.169.254/", "images.hosts does not name"),
        ("file:///etc/passwd", "neither http, https nor data"),
        ("data:image/png;base64,AAAA", "neither http, https nor data"),
        ("/again", "is redirected more than 3 times"),
        ("http://[", "cannot be fetched"),
    ],
)
async def test_a_redirect_leads_nowhere_else(target: str, why: str) -> None:
    async with site() as there:
        there.answers["/again"] = lambda _: web.Response(status=302, headers={"Location": target})
        with pytest.raises(FetchFailed) as failed:
            await there.fetcher().fetch(there.url("/again"))
        assert why in str(failed.value)


async def test_a_redirect_to_an_address_that_is_not_public_is_not_followed() -> None:
    async with site() as there:
        there.addresses = [["127.0.0.1"], ["169.254.169.254"]]
        there.answers["/a"] = lambda _: web.Response(
            status=302, headers={"Location": f"http://other.example:{there.port}/b"}
        )
        with pytest.raises(FetchFailed, match=r"has the address 169\.254\.169\.254, and that is not public"):
            await there.fetcher(allows=lambda address: address == "127.0.0.1").fetch(there.url("/a"))


async def test_bodies_are_read_up_to_the_limit() -> None:
    async with site() as there:
        there.answers["/endless"] = lambda _: web.StreamResponse()
        there.answers["/large"] = lambda _: web.Response(body=bytes(2 << 20))
        there.answers["/packed"] = lambda _: web.Response(body=FILE, headers={"Content-Encoding": "gzip"})
        there.answers["/gone"] = lambda _: web.Response(status=404)
        for path, why in (
            ("/endless", "has more than 1048576 bytes (images.bytes)"),
            ("/large", "has more than 1048576 bytes (images.bytes)"),
            ("/packed", "comes compressed"),
            ("/gone", "its server answers 404"),
        ):
            with pytest.raises(FetchFailed) as failed:
                await there.fetcher().fetch(there.url(path))
            assert why in str(failed.value), path


async def test_a_server_that_says_nothing_is_left_after_the_time() -> None:
    async with site() as there:
        there.answers["/slow"] = lambda _: web.Response()
        with pytest.raises(FetchFailed, match=r"was not fetched within 0.1 s \(images.fetch_s\)"):
            await there.fetcher(time_limit_s=0.1).fetch(there.url("/slow"))


async def test_a_server_that_is_not_there_and_a_name_without_an_address_are_said() -> None:
    async with site() as there:
        pass
    with pytest.raises(FetchFailed, match="cannot be fetched: "):
        await there.fetcher().fetch(there.url("/a"))
    there.addresses = [[]]
    with pytest.raises(FetchFailed, match="which has no address"):
        await there.fetcher().fetch(there.url("/a"))
