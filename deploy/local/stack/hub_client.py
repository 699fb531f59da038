"""HTTP to a hub: reads its answers and fetches files, which continue where an earlier try has ended.

Nothing waits without a bound: each read has a time limit, as have all reads up to the end of an answer's headers and up
to the next piece of its body together; a body must keep a least rate, and tries are few: in a row without progress, and
in all. Redirects are followed here, so that the access token stays with the hub and no other
scheme is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO
from urllib.parse import quote, urlsplit

import httpx2
from huggingface_hub import close_session, constants, get_session, get_token
from huggingface_hub.errors import OIDCError

from deploy.local.stack.hub_files import HubFile, HubModel
from shared.config import environment
from shared.deadline import Deadline
from shared.errors import ModelError
from shared.installation import BIN
from shared.version import VERSION

REDIRECTS = 5
"""The maximum number of redirects of a request."""
TRIES = 4
"""The maximum number of tries in a row of which none brings `LEAST_BYTES` of a file."""
TRIES_IN_ALL = 100
"""The maximum number of tries of one file, however much each brings."""
FILE_LIMIT_S = 86400.0
"""Seconds after which a file that is not whole is given up. The next start continues it."""
LIST_LIMIT_S = 300.0
"""Seconds after which a list of files that is not whole is given up."""
PAUSE_S = 1.0
"""Seconds before the second try; each further pause is twice as long."""
WAIT_LIMIT_S = 60.0
"""The maximum number of seconds that the hub may ask to wait."""
ANSWER_LIMIT_S = 30.0
"""Seconds that the headers of an answer may take, with all redirects, and then each piece of its body."""
LEAST_BYTES = 256 << 10
"""The number of bytes that must come in each `WINDOW_S`; fewer are too slow."""
WINDOW_S = 30.0
_PIECE_BYTES = 1 << 20
_AGAIN = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which another try may succeed."""


class _Passing(Exception):
    """A fault that another try may not have; `wait_s` is how long the hub asks to wait, 0 if it does not say."""

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.wait_s = wait_s


class _Tries:
    """The bounds of what is tried again: tries in a row without progress, tries in all, and time."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until_s = time.monotonic() + limit_s
        self._in_a_row = 0
        self._in_all = 0

    def check_time(self) -> None:
        """Raise _Passing if the time is over."""
        if time.monotonic() >= self._until_s:
            raise _Passing(f"not whole after {self._limit_s:g} s")

    def failed(self, wrong: _Passing, *, progress: bool) -> float | None:
        """Count a try that has failed. Return the seconds to wait before the next one; None if it was the last."""
        self._in_all += 1
        self._in_a_row = 1 if progress else self._in_a_row + 1
        late = time.monotonic() >= self._until_s
        if late or self._in_a_row >= TRIES or self._in_all >= TRIES_IN_ALL:
            return None
        return wrong.wait_s or PAUSE_S * 2 ** (self._in_a_row - 1)


class HubClient:
    """The hub of HF_ENDPOINT, as the user of HF_TOKEN or of the token file."""

    def __init__(self) -> None:
        """Read the endpoint and the token. Raises ModelError if they cannot be used."""
        self._endpoint = constants.ENDPOINT
        parts = urlsplit(self._endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ModelError("HF_ENDPOINT is not an address such as https://huggingface.co")
        self.host = parts.netloc.rpartition("@")[2]
        self._page = parts._replace(netloc=self.host).geturl()  # without a password
        self._headers = {"User-Agent": f"headrace/{VERSION}", "Accept-Encoding": "identity"}
        try:
            self._token = "" if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token() or ""
        except (OSError, ValueError, httpx2.HTTPError, OIDCError) as wrong:  # of which the text may show the token
            raise ModelError(f"{self._token_source}: {_kind(wrong)}") from None
        if not self._token.isascii() or not self._token.isprintable():
            raise ModelError(f"{self._token_source} must contain only a token")
        if self._token:
            self._headers["Authorization"] = f"Bearer {self._token}"
        try:
            get_session()
        except (OSError, ValueError, ImportError) as wrong:  # of which the text may show the proxy's password
            raise ModelError(
                f"{self.host}: HTTPS_PROXY, SSL_CERT_FILE or another variable of that kind: {_kind(wrong)}"
            ) from None

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        close_session()

    def listing(
        self,
        model: HubModel,
        limit_bytes: int,
        notice: Callable[[str], None] = lambda _text: None,
        *,
        once: bool = False,
    ) -> bytes:
        """Return the hub's description of a repository at a revision, as JSON. Raises ModelError.

        `notice` gets why it is asked again, which it is not with `once`.
        """
        url = f"{self._endpoint}/api/models/{model.repository}/revision/{quote(model.revision, safe='')}?blobs=true"
        tries = _Tries(LIST_LIMIT_S)
        while True:
            content = bytearray()
            try:
                with self._answered(model, url, {}) as (answer, deadline):
                    for piece in self._pieces(answer, deadline, tries):
                        content += piece
                        if len(content) > limit_bytes:
                            raise ModelError(f"{model}: the list of its files has more than {limit_bytes} bytes")
                return bytes(content)
            except _Passing as wrong:
                if (pause_s := tries.failed(wrong, progress=False)) is None or once:
                    raise ModelError(f"{wrong}; try again later") from None
                notice(f"{wrong}; it is asked again in {pause_s:g} s")
                time.sleep(pause_s)

    def fetch(
        self,
        model: HubModel,
        commit: str,
        file: HubFile,
        path: Path,
        until_bytes: int,
        progress: Callable[[int], None],
    ) -> str:
        """Fetch a file's first `until_bytes` bytes into `path`, after those that it has, and return the digest of all.

        They are then on the disk. `progress` gets the length. Raises ModelError, also if what comes is longer or
        shorter than the hub has announced; OSError of the disk.
        """
        url = f"{self._endpoint}/{model.repository}/resolve/{commit}/{quote(file.name)}"
        tries = _Tries(FILE_LIMIT_S)
        with path.open("a+b") as out:
            part = _Part(file, out, progress)
            while (had := part.length) < until_bytes:
                try:
                    self._continue(model, url, file, part, until_bytes, tries)
                except _Passing as wrong:
                    pause_s = tries.failed(wrong, progress=part.length - had >= LEAST_BYTES)
                    if pause_s is None:
                        raise ModelError(f"{model}: {file.name}: {wrong}; the next start continues there") from None
                    time.sleep(pause_s)
            out.flush()
            os.fsync(out.fileno())  # a name, or what follows a head, must not outlive it if the machine stops now
        return part.digest

    def _continue(self, model: HubModel, url: str, file: HubFile, part: _Part, until_bytes: int, tries: _Tries) -> None:
        have = part.length
        asked = {"Range": f"bytes={have}-{until_bytes - 1}"} if have or until_bytes < file.size_bytes else {}
        with self._answered(model, url, asked) as (answer, deadline):
            if answer.status_code == 200:  # the server has ignored the range
                part.empty()
                whole = answer.headers.get("Content-Length", str(file.size_bytes))
            else:
                whole = answer.headers.get("Content-Range", "").removeprefix(f"bytes {have}-{until_bytes - 1}/")
            if whole != str(file.size_bytes):
                raise ModelError(
                    f"{model}: {file.name}: {file.size_bytes} bytes were announced, but {self.host} sends {whole[:40]}"
                )
            for piece in self._pieces(answer, deadline, tries):
                if part.length + len(piece) > file.size_bytes:
                    raise ModelError(f"{model}: {file.name}: longer than the {file.size_bytes} bytes announced")
                part.append(piece[: until_bytes - part.length])
                if part.length == until_bytes < file.size_bytes:
                    return
        if part.length < until_bytes:
            raise _Passing(f"{self.host} ended it after {part.length} of {file.size_bytes} bytes")

    @contextmanager
    def _answered(
        self, model: HubModel, url: str, headers: dict[str, str]
    ) -> Iterator[tuple[httpx2.Response, Deadline]]:
        """Yield the answer, whose body is not read yet, and the deadline of its next piece.

        Raises ModelError or _Passing.
        """
        client, host = get_session(), self.host
        timeout_s = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        with Deadline(max(ANSWER_LIMIT_S, timeout_s), close_session) as deadline:
            try:
                request = client.build_request("GET", url, headers=self._headers | headers, timeout=timeout_s)
                for _ in range(REDIRECTS + 1):
                    answer = client.send(request, stream=True, follow_redirects=False)
                    try:
                        following = answer.next_request  # without the token, if it goes to another origin
                        if following is None:
                            self._refuse(model, answer)
                            deadline.extend()
                            yield answer, deadline
                            return
                    finally:
                        answer.close()
                    if following.url.scheme not in ("https", request.url.scheme):
                        raise ModelError(
                            f"{model}: {host} redirects to an address that begins with"
                            f" {following.url.scheme}:, which is not followed"
                        )
                    request, host = following, following.url.netloc.decode()
                raise ModelError(f"{model}: {self.host} redirects more than {REDIRECTS} times")
            except (httpx2.HTTPError, httpx2.InvalidURL, RuntimeError) as wrong:
                if deadline.late:
                    raise _Passing(f"{host} did not answer whole within {deadline.limit_s:g} s") from None
                if isinstance(wrong, RuntimeError):  # a closed client raises it
                    raise
                if isinstance(wrong, httpx2.TimeoutException):
                    raise _Passing(f"{host} did not answer within {timeout_s:g} s") from None
                raise _Passing(f"{host} cannot be reached: {wrong or type(wrong).__name__}") from None

    def _pieces(self, answer: httpx2.Response, deadline: Deadline, tries: _Tries) -> Iterator[bytes]:
        """Yield the body. Raises _Passing if it comes too slowly, or if the time is over."""
        began_s, came = time.monotonic(), 0
        for piece in answer.iter_raw():
            deadline.extend()
            tries.check_time()
            yield piece
            came += len(piece)
            if (now_s := time.monotonic()) - began_s >= WINDOW_S:
                if came < LEAST_BYTES:
                    raise _Passing(f"{self.host} sent only {came} bytes in {now_s - began_s:.0f} s")
                began_s, came = now_s, 0

    def _refuse(self, model: HubModel, answer: httpx2.Response) -> None:
        """Raise what an answer that is no success means, and what to do."""
        status, code = answer.status_code, answer.headers.get("X-Error-Code", "")
        page = f"{self._page}/{model.repository}"
        log_in = f"set HF_TOKEN, or log in with `{BIN}hf auth login`"
        if status in (200, 206):
            return
        if status in _AGAIN:
            text = f"{self.host} answers {status}{' (too many requests)' if status == 429 else ''}"
            after = answer.headers.get("Retry-After", "")
            wait_s = float(after) if after.isdecimal() and len(after) < 9 else 0.0
            if wait_s > WAIT_LIMIT_S:
                raise ModelError(f"{model}: {text} and asks to wait {wait_s:.0f} s: try again then")
            raise _Passing(text, wait_s)
        if code == "GatedRepo":
            what = "this account has no access yet" if self._token else f"accept its terms, then {log_in}"
            raise ModelError(f"{model} is gated: {what}: {page}")
        if code == "RevisionNotFound":
            raise ModelError(f"{model.repository} has no revision {model.revision}: {page}")
        if status == 401 and self._token and code != "RepoNotFound":
            raise ModelError(f"{model}: {self.host} refuses the token of {self._token_source}")
        if status in (401, 404) and code != "EntryNotFound":
            how = "check the name" if self._token else f"check the name; if it is private, {log_in}"
            raise ModelError(f"{self.host} has no model {model.repository}, or it is private: {how}")
        raise ModelError(f"{model}: {self.host} answers {status} for {answer.request.url.path}")

    @property
    def _token_source(self) -> str:
        return "HF_TOKEN" if environment().get("HF_TOKEN") else str(constants.HF_TOKEN_PATH)


class _Part:
    """The beginning of a file, on the disk, with its length and digest."""

    def __init__(self, file: HubFile, out: BinaryIO, progress: Callable[[int], None]) -> None:
        """Read what is there; `out` is open to read and to append."""
        self._file = file
        self._out = out
        self._progress = progress
        self._begin()
        out.seek(0)
        while piece := out.read(_PIECE_BYTES):
            self._count(piece)

    @property
    def digest(self) -> str:
        """The digest, of the kind that the hub has announced."""
        return self._digest.hexdigest()

    def append(self, piece: bytes) -> None:
        """Write a piece at the end."""
        self._out.write(piece)
        self._count(piece)

    def empty(self) -> None:
        """Forget all of it."""
        self._out.truncate(0)
        self._begin()

    def _begin(self) -> None:
        self.length = 0
        self._digest = self._file.new_hash()

    def _count(self, piece: bytes) -> None:
        self._digest.update(piece)
        self.length += len(piece)
        self._progress(self.length)


def _kind(wrong: Exception) -> str:
    """Return what an error is, without its text."""
    return (wrong.strerror if isinstance(wrong, OSError) else None) or type(wrong).__name__
