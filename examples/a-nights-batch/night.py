"""Answers a file of requests, a bounded number at once; what fails is tried again, and a second start goes on.

    python night.py requests.jsonl answers.jsonl [--at-once 32] [--tries 60]

Both files are those of OpenAI's batch API: a line has `custom_id`, `url` and `body`, and its answer `custom_id`,
`response` and `error`. OPENAI_BASE_URL and OPENAI_API_KEY say which server is asked. Requests have priority 10, so that
others go first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, OpenAIError

MOST_REQUESTS = 50_000
"""As many as a file of OpenAI's batch API may have."""
PRIORITY = 10


def read_requests(file: Path) -> dict[str, dict[str, Any]]:
    """Return the requests by their ids. Raise ValueError, which names the line, for what is none."""
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
            name, url, body = request["custom_id"], request["url"], request["body"]
            fits = isinstance(name, str) and url.startswith("/v1/") and isinstance(body, dict)
        except (ValueError, KeyError, TypeError, AttributeError):
            fits = False
        if not fits:
            raise ValueError(
                f"{file}:{number}: needs a text custom_id, a url that begins with /v1/, and an object body"
            )
        if name in found:
            raise ValueError(f"{file}:{number}: a second request with the custom_id {name}")
        found[name] = request
    if len(found) > MOST_REQUESTS:
        raise ValueError(f"{file}: more than {MOST_REQUESTS} requests")
    return found


def read_answered(file: Path) -> set[str]:
    """Return the ids of the requests that have an answer. Cut off a last line that was not written whole.

    Raise ValueError.
    """
    answered: set[str] = set()
    if not file.exists():
        return answered
    with file.open("rb+") as lines:
        whole_bytes = 0
        for line in lines:
            if not line.endswith(b"\n"):
                break
            whole_bytes += len(line)
            try:
                found = json.loads(line)
                if found["response"] and found["response"]["status_code"] == 200:
                    answered.add(found["custom_id"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{file}: not a file of answers") from None
        lines.truncate(whole_bytes)
    return answered


async def ask(client: AsyncOpenAI, request: dict[str, Any]) -> dict[str, Any]:
    """Return the line of the answers for a request."""
    response, error = None, None
    try:
        body = await client.post(
            request["url"].removeprefix("/v1"), body={"priority": PRIORITY, **request["body"]}, cast_to=object
        )
        response = {"status_code": 200, "body": body}
    except APIStatusError as wrong:
        response = {"status_code": wrong.status_code, "body": wrong.body}
    except APIConnectionError as wrong:
        error = {"code": "connection", "message": str(wrong)}
    return {"custom_id": request["custom_id"], "response": response, "error": error}


async def answer(requests: list[dict[str, Any]], answers: TextIO, *, at_once: int, tries: int) -> int:
    """Ask everything; write answers as they come. Return how many requests have none."""
    waiting: Iterator[dict[str, Any]] = iter(requests)
    failed = 0

    async def one_after_another(client: AsyncOpenAI) -> None:
        nonlocal failed
        for request in waiting:
            line = await ask(client, request)
            failed += line["response"] is None or line["response"]["status_code"] != 200
            answers.write(json.dumps(line, ensure_ascii=False) + "\n")
            answers.flush()

    # The client waits between tries, at most 8 s or what the server asks for, and asks again after 408, 409, 429, 5xx
    # and a lost connection.
    async with AsyncOpenAI(max_retries=tries - 1) as client, asyncio.TaskGroup() as tasks:
        for _ in range(min(at_once, len(requests))):
            tasks.create_task(one_after_another(client))
    return failed


def main() -> int:
    """Return 0 if every request has an answer, 1 if some have none, 2 for what is wrong with files or settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--at-once", type=int, default=32, help="requests at once (32)")
    parser.add_argument("--tries", type=int, default=60, help="tries of each request: 60 are some six minutes (60)")
    flags = parser.parse_args()
    if min(flags.at_once, flags.tries) < 1:
        parser.error("--at-once and --tries are at least 1")
    try:
        requests = read_requests(flags.requests)
        answered = read_answered(flags.answers)
    except (OSError, ValueError) as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    left = [request for name, request in requests.items() if name not in answered]
    try:
        with flags.answers.open("a", encoding="utf-8") as answers:
            failed = asyncio.run(answer(left, answers, at_once=flags.at_once, tries=flags.tries))
    except (OSError, OpenAIError) as wrong:  # such as a missing OPENAI_API_KEY
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    print(f"{len(requests)} requests: {len(requests) - failed} answered, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
