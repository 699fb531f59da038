"""services/frontend/serving/text_servers.py: servers over real TLS, by their address and with the name of their URL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from services.frontend.config import TextServersConfig
from services.frontend.serving.text_servers import TextAnswer, TextServers
from services.frontend.serving.text_tries import TextFault
from shared.messages.cards import MODEL_CARD, ModelCard
from shared.messages.codec import JSON_HEADER
from tests.authority import Authority, needs_openssl, serving
from tests.frontend.text_peer import text_card
from tests.tiny_model import write_tiny_model
from tests.worker.attached.peer import Peer, answering

HOST = "text.test"
PATH = "/v1/completions"


def card_of(url: str, address: str) -> ModelCard:
    (encoded,) = text_card("w1", url).values()
    return msgspec.structs.replace(MODEL_CARD.decode(encoded, JSON_HEADER), address=address)


async def sent(config: TextServersConfig, card: ModelCard, path: str = PATH) -> str:
    """Return the first part of an answer, or what is wrong."""
    async with aclosing(TextServers(config, 1)) as servers:
        answer = await servers.send(card, path, b"{}", "r")
        if isinstance(answer, TextFault):
            return f"{answer.loss}: {answer.why}"
        assert isinstance(answer, TextAnswer)
        answer.response.close()
        return answer.first.decode()


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    """A server over https at 127.0.0.2, whose certificate is of HOST."""
    authority = Authority(tmp_path)
    one = Peer(write_tiny_model(tmp_path / "tiny"))
    async with answering(one, "127.0.0.2", serving(*authority.sign(HOST))):
        yield one


@needs_openssl
async def test_a_certificate_is_of_the_urls_name_and_the_address_is_the_cards(peer: Peer, tmp_path: Path) -> None:
    port = peer.url.rpartition(":")[2]
    trusted = TextServersConfig(ca_file=str(tmp_path / "authority.pem"))
    card = card_of(f"https://{HOST}:{port}", f"127.0.0.2:{port}")
    assert (await sent(trusted, card)).startswith("data: ")
    assert [headers["Host"] for headers in peer.seen] == [f"{HOST}:{port}"]
    other = card_of(f"https://other.test:{port}", f"127.0.0.2:{port}")
    assert (await sent(trusted, other)).startswith("unreachable: does not answer: its certificate is refused: Hostname")
    said = await sent(TextServersConfig(), card)
    assert said.startswith("unreachable: does not answer: its certificate is refused: ")
    assert said.endswith("; text.ca_file names an authority")


async def test_a_path_of_the_url_stays_and_what_accepts_no_connection_is_named(tmp_path: Path) -> None:
    peer = Peer(write_tiny_model(tmp_path / "tiny"))
    port = peer.url.rpartition(":")[2]
    card = card_of(f"http://{HOST}:{port}/api/", f"127.0.0.2:{port}")
    async with answering(peer, "127.0.0.2"):
        await sent(TextServersConfig(), card)
    assert len(peer.seen) == 1
    assert await sent(TextServersConfig(), card) == "unreachable: does not answer: Connection refused"
