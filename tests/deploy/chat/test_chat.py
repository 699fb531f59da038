"""deploy/local/chat/chat.py as a program: in pipes, and on a terminal of its own."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.local.chat.chat import HELP, Conversation, read_line
from shared.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 180.0
USAGE = {"prompt_tokens": 9, "completion_tokens": 2}
WAITING = """
import signal, socket, threading, time
from deploy.local.chat.chat import noticed_interrupts

here, there = socket.socketpair()

def interrupt():
    time.sleep(0.5)
    # In this thread: the main thread's wait goes on, as with a signal that came just before it.
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

with noticed_interrupts():
    threading.Thread(target=interrupt).start()
    try:
        here.recv(1)
    except KeyboardInterrupt:
        print("interrupted")
print(signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM) is signal.SIG_DFL)
"""


class Parrot:
    """An OpenAI endpoint that repeats the question. `wait` says a word and then nothing, until its client is gone;
    `think` thinks; `long` is too long; `ring` has what a terminal would obey."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.left = threading.Event()
        parrot = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._begin(200)
                self.wfile.write(json.dumps({"data": [{"id": "tiny"}, {"id": "other"}]}).encode())

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                parrot.asked.append(asked)
                question = asked["messages"][-1]["content"]
                if question == "long":
                    self._begin(400)
                    error = {"message": "the prompt is too long", "code": "context_length_exceeded"}
                    self.wfile.write(json.dumps({"error": error}).encode())
                    return
                self._begin(200)
                if question == "think":
                    self._say({"reasoning_content": "hm "})
                    self._say({"reasoning_content": "hm"})
                self._say({"content": "a\033[2Jb\n" if question == "ring" else f"you said {question}"})
                if question == "wait":
                    with suppress(OSError):
                        self.connection.recv(1)  # b"" or an error: the client has gone
                    parrot.left.set()
                    return
                self._say({}, finish_reason="length" if question == "cut" else "stop")
                self.wfile.write(b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")

            def _begin(self, status: int) -> None:
                self.send_response(status)
                self.end_headers()

            def _say(self, delta: dict[str, str], finish_reason: str | None = None) -> None:
                chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the name is the base class's
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)

    @property
    def command(self) -> list[str]:
        url = f"http://127.0.0.1:{self.server.server_port}/v1"
        return [sys.executable, "-P", "-m", "deploy.local.cli", "chat", "--url", url]


@pytest.fixture
def parrot() -> Iterator[Parrot]:
    parrot = Parrot()
    serving = threading.Thread(target=parrot.server.serve_forever, args=(0.01,))
    serving.start()
    yield parrot
    parrot.server.shutdown()
    serving.join()
    parrot.server.server_close()


def piped(parrot: Parrot, given: bytes, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [*parrot.command, *words]
    return subprocess.run(command, input=given, cwd=ROOT, capture_output=True, timeout=LIMIT_S)


def test_all_of_a_pipe_is_one_question(parrot: Parrot) -> None:
    done = piped(parrot, b"/clear\nhello\n", "--system", "Be short.")
    assert (done.returncode, done.stdout) == (0, b"you said /clear\nhello\n")
    assert done.stderr == b"[9 prompt tokens, 0 of them cached; 2 generated]\n"
    assert parrot.asked[0]["messages"][0] == {"role": "system", "content": "Be short."}


def test_a_question_leaves_a_pipe_alone(parrot: Parrot) -> None:
    assert piped(parrot, b"not read", "hello").stdout == b"you said hello\n"


def test_an_empty_question_is_not_asked(parrot: Parrot) -> None:
    done = piped(parrot, b"not read", " ")
    assert (done.returncode, done.stderr) == (2, b"error: the question is empty\n")
    assert parrot.asked == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (b"", b"stdin is empty"),
        (b" \n", b"stdin is empty"),
        (b"\xff", b"stdin: not UTF-8"),
        (b"x" * 5_000_000, b"at m"),
    ],
)
def test_a_pipe_without_a_usable_question_is_wrong_usage(parrot: Parrot, given: bytes, said: bytes) -> None:
    done = piped(parrot, given)
    assert (done.returncode, done.stdout, parrot.asked) == (2, b"", [])
    assert done.stderr.startswith(b"error: stdin")
    assert said in done.stderr


def test_a_pipe_gets_the_answer_as_it_is_and_the_reasoning_apart(parrot: Parrot) -> None:
    assert piped(parrot, b"ring").stdout == b"a\033[2Jb\n\n"
    done = piped(parrot, b"think")
    assert done.stdout == b"you said think\n"
    assert done.stderr.startswith(b"[thinking]\nhm hm\n[answer]\n[9 prompt")


def test_an_answer_that_the_limit_ends_says_so(parrot: Parrot) -> None:
    assert piped(parrot, b"cut").stderr.endswith(b"2 generated, the limit of --max-tokens]\n")


class Person:
    """Types into a `chat` on a terminal of its own, and reads what it shows."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execve(command[0], command, os.environ | {"TERM": "dumb"} | environment)
        self._deadline = time.monotonic() + LIMIT_S
        self.shown = ""

    def read_until(self, text: str) -> str:
        """Read until the text is shown; return what was shown up to it."""
        while text not in self.shown:
            self._read()
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def ask(self, question: str) -> str:
        """Type a line at the prompt; return what is shown until the next prompt."""
        self.read_until(">>> ")
        self.type(f"{question}\n")
        self.read_until("\n")
        shown = ""
        while ">>> " not in self.shown:
            self._read()
        shown, _, rest = self.shown.partition(">>> ")
        self.shown = f">>> {rest}"
        return shown.replace("\r", "")

    def status(self) -> int:
        """Wait for the end of the program; return its exit status."""
        while select.select([self._terminal], [], [], 0)[0]:
            try:
                self._read()
            except OSError:  # Linux: the last process has closed the terminal
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self._terminal)

    def _read(self) -> None:
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, self._deadline - time.monotonic()))
        assert ready, f"not shown in time; shown: {self.shown!r}"
        self.shown += os.read(self._terminal, 4096).decode(errors="replace")


@pytest.fixture
def person(parrot: Parrot) -> Iterator[Person]:
    person = Person(parrot.command)
    yield person
    person.close()


def test_a_conversation_remembers_until_it_is_cleared(parrot: Parrot, person: Person) -> None:
    assert person.ask("one").startswith("you said one\n[9 prompt tokens")
    assert person.ask("") == ""
    assert person.ask("/system Be short.") == ""
    assert person.ask("two").startswith("you said two\n")
    assert [each["content"] for each in parrot.asked[-1]["messages"]] == ["Be short.", "one", "you said one", "two"]
    assert person.ask("/clear") == ""
    assert person.ask("three").startswith("you said three\n")
    assert [each["content"] for each in parrot.asked[-1]["messages"]] == ["Be short.", "three"]
    person.read_until(">>> ")
    person.type("/exit\n")
    assert person.status() == 0


def test_another_model_is_asked_if_there_is_one(parrot: Parrot, person: Person) -> None:
    assert person.ask("/model") == "tiny (asked now)\nother\n"
    assert person.ask("/model big") == "error: big: no such model; there are tiny, other\n"
    assert person.ask("/model other") == ""
    person.ask("one")
    assert parrot.asked[-1]["model"] == "other"
    assert person.ask("/quit").startswith("error: /quit: no such command; /help shows them")
    assert "/clear        forget what was said\n" in person.ask("/help")
    person.read_until(">>> ")
    person.type("\x04")
    assert person.status() == 0


def test_ctrl_c_ends_the_answer_and_then_the_program(parrot: Parrot, person: Person) -> None:
    person.read_until(">>> ")
    person.type("wait\n")
    person.read_until("you said wait")
    person.type("\x03")
    assert parrot.left.wait(LIMIT_S), "the request was not cancelled"
    person.read_until("[stopped]")
    assert person.ask("one").startswith("you said one\n")
    assert [each["content"] for each in parrot.asked[-1]["messages"]] == ["wait", "you said wait", "one"]
    person.read_until(">>> ")
    person.type("\x03")
    assert person.status() == 130


def test_a_conversation_that_is_too_long_says_what_to_do_and_goes_on(parrot: Parrot, person: Person) -> None:
    assert person.ask("long") == "error: the prompt is too long; /clear forgets what was said\n"
    person.ask("one")
    assert len(parrot.asked[-1]["messages"]) == 1
    parrot.server.shutdown()
    parrot.server.server_close()
    assert "error: nothing answers at http://" in person.ask("two")
    person.read_until(">>> ")
    person.type("\x04")
    assert person.status() == 0


def test_a_terminal_shows_no_control_characters_and_the_reasoning_dim(parrot: Parrot) -> None:
    person = Person([*parrot.command, "ring"])
    person.read_until("a\ufffd[2Jb")
    assert person.status() == 0
    person.close()
    person = Person([*parrot.command, "think"], TERM="xterm")
    assert "\033[2mhm \033[0m\033[2mhm\033[0m" in person.read_until("you said think")
    assert person.status() == 0
    person.close()


def test_ctrl_c_ends_a_single_question(parrot: Parrot) -> None:
    asking = subprocess.Popen([*parrot.command, "wait"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert asking.stdout is not None
    with asking.stdout as answer:
        assert answer.read(8) == b"you said"
        asking.send_signal(signal.SIGINT)
        assert asking.wait(LIMIT_S) == 130
    assert parrot.left.wait(LIMIT_S)


def test_a_question_is_asked_with_what_was_said_before() -> None:
    conversation = Conversation("Be short.")
    conversation.keep("One?", "1")
    conversation.keep("stopped at once", "")
    assert conversation.messages("Two?") == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    conversation.clear()
    conversation.system = ""
    assert conversation.messages("Two?") == [{"role": "user", "content": "Two?"}]


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("Hello there \n", ("", "Hello there")),
        ("", ("", "")),
        (" /etc/passwd is what?", ("", "/etc/passwd is what?")),
        ("/clear", ("/clear", "")),
        ("/model  ORG/name ", ("/model", "ORG/name")),
        ("/system Be short. And kind.", ("/system", "Be short. And kind.")),
    ],
)
def test_a_line_is_a_command_or_a_question(line: str, read: tuple[str, str]) -> None:
    assert read_line(line) == read


def test_every_command_of_the_help_is_one() -> None:
    assert [read_line(command)[0] for command in HELP] == [command.split()[0] for command in HELP]


@pytest.mark.parametrize("line", ["/quit", "/models", "/", "/etc/passwd is what?"])
def test_another_command_is_refused_and_said(line: str) -> None:
    with pytest.raises(ConfigError, match=f"{line.split()[0]}: no such command; /help shows them"):
        read_line(line)


def test_an_interrupt_that_does_not_end_the_wait_is_noticed_and_the_timer_is_gone_afterwards() -> None:
    command = [sys.executable, "-c", WAITING]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "interrupted\n(0.0, 0.0) True\n"
