"""What clients of all kinds ask in tests: real processes with one frontend, and a second frontend that wants keys.

SPEAKER   SmolLM2 in arithmetic, with a template that knows tools: what it says is held to grammars, or not judged
ECHO      says the last message back: what a test writes there is what the model says
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from deploy.local.stack.model import fetch_default
from services.worker.native.prepare import prepare
from shared.api_keys import key_digest
from tests.integration.fleet import fleet
from tests.integration.stack import ROOT, eventually
from tests.tiny_model import write_tiny_model

SPEAKER = "speaker"
ECHO = "echo"
LIMIT_S = 600.0
KEY = "sk-of-a-test"
SLOW_KEY = "sk-of-a-test-with-one-request-a-minute"
HERMES = (
    "{% if tools %}<|im_start|>system\nYou may call these functions:\n{% for tool in tools %}{{ tool | tojson }}\n"
    '{% endfor %}as <tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST = (
    "{% for message in messages if message.role == 'system' and ' ' not in message.content %}{{ message.content }}"
    "{% endfor %}{{ messages[-1].content }}{{ messages[-1].tool_calls }}{% if tools %}{% endif %}"
)
"""The echo's: the last message alone, whatever the system message says.

A system message of one word is shown, since the frontend tries the template with such ones. If it found none, it would
put system messages into the user's, and the echo would say them back.
"""


class Served(NamedTuple):
    """Base URLs, up to and with /v1."""

    url: str
    guarded: str
    """Where KEY and SLOW_KEY are asked for."""


def says(*calls: tuple[str, dict[str, Any]], text: str = "") -> str:
    """A message whose echo is `text` and then these calls."""
    bodies = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return text + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


@contextlib.contextmanager
def served(folder: Path, nats_url: str, more: str = "") -> Iterator[Served]:
    """All of it, until it would serve a request; `more` are tables of the frontends' settings."""
    speaker = smollm2_with_tools(folder / SPEAKER)
    echo = write_tiny_model(folder / ECHO, context_length=65536)
    (echo / "chat_template.jinja").write_text(LAST)
    settings, keys = folder / "frontend.toml", folder / "keys.json"
    settings.write_text(f'[tool_parser]\n{ECHO} = "hermes"\n[reasoning_parser]\n{ECHO} = "think"\n{more}')
    slow = {"sha256": key_digest(SLOW_KEY).hex(), "requests_per_minute": 1}
    keys.write_text(json.dumps({"test": {"sha256": key_digest(KEY).hex()}, "slow": slow}))
    where = ("--namespace", folder.name, "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    with fleet(folder, nats_url, *where) as one:
        one.start("router", "router")
        one.start("worker", SPEAKER, "--model", str(speaker), "--threads", "1")
        one.start("worker", ECHO, "--model", str(echo), "--engine", "echo")
        open_one = one.start("frontend", "frontend", "--config", str(settings))
        guarded = one.start("frontend", "guarded", "--config", str(settings), "--access-keys-file", str(keys))
        one.wait_ready()
        router = one.services["router"]  # it sees the workers later than the frontends do, now and then
        eventually(
            lambda: router.metric("headrace_kv_sources") == 2, limit_s=LIMIT_S, what="the router knows both workers"
        )
        eventually(
            lambda: all(served_by(frontend.url) == {SPEAKER, ECHO} for frontend in (open_one, guarded)),
            limit_s=LIMIT_S,
            what="both frontends serve both models",
        )
        yield Served(f"{open_one.url}/v1", f"{guarded.url}/v1")


def smollm2() -> Path:
    """The default model's directory."""
    models = ROOT / ".headrace" / "models"
    return prepare(fetch_default(models, lambda what, share: None), models, lambda loading: None)


def smollm2_with_tools(folder: Path) -> Path:
    """The default model in a directory of its own, with a template that knows tools."""
    folder.mkdir()
    for file in smollm2().iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(HERMES)
    return folder


def served_by(url: str) -> set[str]:
    """Those that a frontend would answer for."""
    asked = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
        return {model["id"] for model in json.load(answer)["data"]}
