"""deploy/compose as a running stack: Docker Compose over podman, on a bridge network, with its own ports.

The files are the checkout's, as a copy, so that keys and certificates of a test come next to them.
"""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from tests.containers.engine import HERE, HOME, ROOT, Engine
from tests.integration.stack import eventually

IMAGE = "docker.io/library/headrace:local"
MODEL = "SmolLM2-135M-Instruct"
LIMIT_S = 600.0
"""Seconds for what the stack has to do; it starts in half a minute on a quiet machine."""
_NAMES = ("SERVICES_PASSWORD", "CLIENT_PASSWORD", "ETCD_ROOT_PASSWORD", "GRAFANA_PASSWORD")
PASSWORDS = {name: f"{name.lower()}-of-a-test" for name in _NAMES}
QUESTIONS = ("Name a river.", "Name a tree.", "What is the capital of France?", "Count to five.", "Name a colour.")


class Answer(NamedTuple):
    """What a client of the API got."""

    status: int
    text: str
    """The body, or the text of a stream; what went wrong if there is no status."""


class Stack:
    """A Compose project. `files` are overlays of compose.yaml."""

    def __init__(self, engine: Engine, *files: str, variables: Mapping[str, str] = {}) -> None:
        self.engine = engine
        self.directory = HOME / "deploy" / "compose"
        self._files = files
        self._variables = {**PASSWORDS, **variables}

    def copy(self) -> None:
        """Copy deploy/, and remove the copy of an earlier test."""
        shutil.rmtree(HOME / "deploy", ignore_errors=True)
        shutil.copytree(ROOT / "deploy", HOME / "deploy", ignore=shutil.ignore_patterns("__pycache__", ".env", "keys"))

    def run(self, *command: str) -> str:
        """Run a command as a user of deploy/compose does, who has set COMPOSE_FILE."""
        files = ":".join(("compose.yaml", *self._files, str(HERE / "podman.yaml")))
        return self.engine.run(*command, directory=self.directory, extra={"COMPOSE_FILE": files, **self._variables})

    def compose(self, *words: str) -> str:
        return self.run("docker", "compose", *words)

    def up(self, *words: str) -> None:
        """Bring it up and wait until all of it is healthy."""
        self.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", str(int(LIMIT_S)), *words)

    def down(self, *words: str) -> None:
        self.compose("down", "--timeout", "60", *words)

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's containers that run."""
        label = json.dumps({"label": [f"com.docker.compose.service={service}"]})
        return [each["Id"] for each in self.engine.ask(f"/v1.41/containers/json?filters={urllib.parse.quote(label)}")]

    def inspect(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.ask(f"/v1.41/containers/{container}/json")
        return found

    def is_healthy(self, service: str, number: int) -> bool:
        """Whether `number` containers of a service run and are healthy."""
        with suppress(OSError, LookupError):  # a container that is being replaced
            states = [self.inspect(each)["State"] for each in self.containers(service)]
            return [state["Health"]["Status"] for state in states if state["Running"]] == ["healthy"] * number
        return False

    def kill(self, service: str, number: int) -> None:
        """Kill a container of a service with all its processes, and wait until it runs again and all `number` of the
        service are healthy."""
        container = self.containers(service)[0]
        pid = self.inspect(container)["State"]["Pid"]
        self.engine.run("kill", "-KILL", str(pid))

        def again() -> bool:
            state = self.inspect(container)["State"]
            return bool(state["Running"] and state["Pid"] not in (0, pid))

        eventually(again, limit_s=LIMIT_S, what=f"{service} runs again")
        eventually(lambda: self.is_healthy(service, number), limit_s=LIMIT_S, what=f"{service} is healthy")

    def get(self, url: str, headers: Mapping[str, str] = {}, tls: ssl.SSLContext | None = None) -> Answer:
        return self.request("GET", url, None, headers, tls)

    def metric(self, expression: str) -> list[dict[str, Any]]:
        """Ask Prometheus. Return an empty list while it does not answer."""
        answer = self.get(f"http://127.0.0.1:9090/api/v1/query?query={urllib.parse.quote(expression)}")
        result: list[dict[str, Any]] = json.loads(answer.text)["data"]["result"] if answer.status == 200 else []
        return result

    def chat(
        self,
        question: str = QUESTIONS[0],
        *,
        url: str = "http://127.0.0.1:8000",
        key: str = "",
        stream: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> Answer:
        """Ask the model; greedy, so that every worker answers alike. Status 0 if the answer has no proper end."""
        body = {"model": MODEL, "temperature": 0, "max_tokens": 24, "stream": stream}
        body |= {"messages": [{"role": "user", "content": question}]}
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        answer = self.request("POST", f"{url}/v1/chat/completions", json.dumps(body), headers, tls)
        if answer.status != 200:
            return answer
        try:
            return answer._replace(text=_content(answer.text, stream))
        except (ValueError, LookupError):
            return answer._replace(status=0)

    def request(
        self, method: str, url: str, body: str | None, headers: Mapping[str, str], tls: ssl.SSLContext | None = None
    ) -> Answer:
        parts = urllib.parse.urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        more: dict[str, Any] = {"context": tls} if tls is not None else {}
        connection = kind(parts.hostname or "", parts.port, timeout=LIMIT_S, **more)
        try:
            with self.engine.entered():
                connection.request(method, parts._replace(scheme="", netloc="").geturl(), body, dict(headers))
            answer = connection.getresponse()
            return Answer(answer.status, answer.read().decode())
        except (OSError, http.client.HTTPException) as wrong:
            return Answer(0, repr(wrong))
        finally:
            connection.close()

    def answers(self) -> bool:
        return self.chat().status == 200


def _content(body: str, stream: bool) -> str:
    """Return the text of an answer. Raise ValueError if a stream has no end."""
    if not stream:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    if events.pop() != "[DONE]":
        raise ValueError(body[-1000:])
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)


class Load:
    """Clients that ask one question after the other."""

    def __init__(self) -> None:
        self.texts: dict[str, set[str]] = {question: set() for question in QUESTIONS}
        self.answered = 0
        self.lost: list[Answer] = []

    def wait_for_more(self, number: int = 8) -> None:
        due = self.answered + number
        eventually(lambda: self.answered >= due, limit_s=LIMIT_S, what="more answers")


@contextmanager
def load(stack: Stack, clients: int = 4, *, fresh: bool = False) -> Iterator[Load]:
    """Ask from several threads at once, half of them with streams, until the block ends. With `fresh` every prompt is
    longer and another one, so that no cache has it."""
    seen, ended = Load(), threading.Event()

    def ask(number: int) -> None:
        while not ended.is_set():
            question = QUESTIONS[number % len(QUESTIONS)]
            asked = f"{number} is a number. " * 20 + question if fresh else question
            answer = stack.chat(asked, stream=number % 2 == 0)
            if answer.status == 200:
                seen.texts[question].add(answer.text)
            else:
                seen.lost.append(answer)
            seen.answered += 1
            number += clients

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def all_targets(stack: Stack, wanted: Sequence[tuple[str, int]]) -> bool:
    """Whether Prometheus scrapes exactly the wanted number of targets of each job, and each answers."""
    found = [(str(row["metric"]["job"]), int(row["value"][1])) for row in stack.metric("sum by (job) (up)")]
    down = stack.metric("up == 0")
    return sorted(found) == sorted(wanted) and not down
