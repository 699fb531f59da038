"""`headrace chat`: streams an answer to stdout; what else there is to say goes to stderr.

Questions come from the command line, from a pipe (one: all that comes), or from a person at a terminal.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

from deploy.local.chat.api import ChatApi, ChatError, Chunks
from deploy.local.terminal import coloured, paint
from deploy.local.usage import ChatFlags
from shared.errors import ConfigError

PROMPT = ">>> "
QUESTION_LIMIT_BYTES = 4 << 20
"""The maximum size of a question from a pipe: frontends accept no larger body."""
TOO_LONG = "context_length_exceeded"
_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""What a terminal would obey: an answer must not move its cursor or set its title."""
HELP = {
    "/clear": "forget what was said",
    "/model NAME": "ask another model; without NAME: show which there are",
    "/system TEXT": "set the system prompt; without TEXT: remove it",
    "/help": "show this",
    "/exit": "end, as Ctrl-D does; Ctrl-C ends an answer, or at the prompt the program",
}
"""Command → what it does."""
_NAMES = tuple(command.split()[0] for command in HELP)
TICK_S = 0.25


class Conversation:
    """What a model is asked to continue: the system prompt, and the questions with their answers so far.

    It grows without a bound of its own; a model's context is the bound, and the server says when it is reached.
    """

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[tuple[str, str]] = []

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return the messages with which the question is asked."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answer in self._turns:
            said += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return [*said, {"role": "user", "content": question}]

    def keep(self, question: str, answer: str) -> None:
        """Remember a question with its answer, or the part of the answer that arrived. Without any, forget both."""
        if answer:
            self._turns.append((question, answer))

    def clear(self) -> None:
        """Forget what was said; the system prompt stays."""
        self._turns.clear()


def read_line(line: str) -> tuple[str, str]:
    """Return (command, its text), or ("", question). Raise ConfigError for a command that there is not."""
    text = line.strip()
    if not line.startswith("/"):
        return "", text
    command, _, rest = text.partition(" ")
    if command not in _NAMES:
        raise ConfigError(
            f"{command}: no such command; /help shows them (a question that begins with / needs a space before it)"
        )
    return command, rest.strip()


def chat(api: ChatApi, flags: ChatFlags) -> None:
    """Ask what there is to ask. Raise ChatError or ConfigError if the only question cannot be answered."""
    question = flags.question
    if question is not None and not question.strip():
        raise ConfigError("the question is empty")
    if question is None and not sys.stdin.isatty():
        question = _piped()
    model = flags.model or api.models()[0]
    if question is None:
        _converse(api, flags, model)
    else:
        Answer().stream(_ask(api, flags, model, Conversation(flags.system).messages(question)))


def _piped() -> str:
    """Return all of stdin as one question."""
    piped = sys.stdin.buffer.read(QUESTION_LIMIT_BYTES + 1)
    if len(piped) > QUESTION_LIMIT_BYTES:
        raise ConfigError(f"stdin: a question has at most {QUESTION_LIMIT_BYTES} bytes")
    try:
        question = piped.decode().strip()
    except UnicodeDecodeError:
        raise ConfigError("stdin: not UTF-8") from None
    if not question:
        raise ConfigError("stdin is empty: there is no question")
    return question


def _ask(api: ChatApi, flags: ChatFlags, model: str, messages: list[dict[str, str]]) -> Chunks:
    sampling = {} if flags.temperature is None else {"temperature": flags.temperature}
    return api.ask(messages, model=model, max_tokens=flags.max_tokens, **sampling)


def _converse(api: ChatApi, flags: ChatFlags, model: str) -> None:
    """Ask what a person types, until Ctrl-D or /exit. KeyboardInterrupt at the prompt ends it, too."""
    with suppress(ImportError):  # some Pythons lack it; lines are then typed without editing and history
        import readline  # noqa: F401 importing it is enough; its history lives in this process only
    conversation = Conversation(flags.system)
    _say(f"{model}; /help shows what you can type")
    while True:
        try:
            command, text = read_line(_typed())
            match command:
                case "/exit":
                    return
                case "/clear":
                    conversation.clear()
                case "/system":
                    conversation.system = text
                case "/model" if not text:
                    _say("\n".join(f"{name}{' (asked now)' if name == model else ''}" for name in api.models()))
                case "/model":
                    if text not in (served := api.models()):
                        raise ConfigError(f"{text}: no such model; there are {', '.join(served)}")
                    model = text
                case "/help":
                    _say("\n".join(f"{name:<14}{explanation}" for name, explanation in HELP.items()))
                case _ if text:
                    _answer_question(api, flags, model, conversation, text)
        except EOFError:
            _say("")
            return
        except (ChatError, ConfigError) as wrong:
            hint = "; /clear forgets what was said" if getattr(wrong, "code", "") == TOO_LONG else ""
            print(f"{paint('error:', 'red', sys.stderr)} {wrong}{hint}", file=sys.stderr)
        except UnicodeDecodeError:
            print(f"{paint('error:', 'red', sys.stderr)} this line is not UTF-8", file=sys.stderr)


def _typed() -> str:
    if sys.stdout.isatty():
        return input(PROMPT)
    print(PROMPT, end="", file=sys.stderr, flush=True)  # stdout has only answers
    return input()


def _answer_question(api: ChatApi, flags: ChatFlags, model: str, conversation: Conversation, question: str) -> None:
    answer = Answer()
    try:
        answer.stream(_ask(api, flags, model, conversation.messages(question)))
    except KeyboardInterrupt:
        _say("[stopped]")
    finally:
        conversation.keep(question, answer.text)


class Answer:
    """An answer that is shown while it arrives."""

    def __init__(self) -> None:
        self.text = ""
        self._thinks = False

    def stream(self, chunks: Chunks) -> None:
        """Show the chunks, then what they cost. Raise ChatError; on any way out, end the line and the request."""
        usage: dict[str, Any] = {}
        limited = False
        with closing(chunks):
            try:
                for chunk in chunks:
                    for choice in chunk.get("choices") or ():
                        delta = choice.get("delta") or {}
                        self._think(delta.get("reasoning_content") or delta.get("reasoning") or "")
                        self._write(delta.get("content") or "")
                        limited = limited or choice.get("finish_reason") == "length"
                    usage = chunk.get("usage") or usage
            finally:
                self._end()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        _say(
            f"[{usage.get('prompt_tokens', '?')} prompt tokens, {cached} of them cached; "
            f"{usage.get('completion_tokens', '?')} generated{', the limit of --max-tokens' if limited else ''}]"
        )

    def _think(self, text: str) -> None:
        """Show reasoning, on stderr: dim, or if there are no colours between two marks."""
        if not text:
            return
        if not self._thinks and not coloured(sys.stderr):
            _show("[thinking]\n", sys.stderr)
        self._thinks = True
        _show(paint(_plain(text, sys.stderr), "dim", sys.stderr), sys.stderr)

    def _write(self, text: str) -> None:
        if not text:
            return
        self._stop_thinking()
        self.text += text
        _show(_plain(text, sys.stdout), sys.stdout)

    def _stop_thinking(self) -> None:
        if self._thinks:
            _show("\n" if coloured(sys.stderr) else "\n[answer]\n", sys.stderr)
        self._thinks = False

    def _end(self) -> None:
        self._stop_thinking()
        if self.text:
            _show("\n", sys.stdout)


def _plain(text: str, stream: TextIO) -> str:
    """Return the text without what a terminal would obey; a pipe gets the answer as it is."""
    return text.translate(_CONTROL) if stream.isatty() else text


def _show(text: str, stream: TextIO) -> None:
    stream.write(text)
    stream.flush()


def _say(text: str) -> None:
    print(paint(text, "dim", sys.stderr) if text else "", file=sys.stderr)


@contextmanager
def noticed_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at most TICK_S after Ctrl-C. For the main thread of a program without other timers.

    Python looks at signals before it waits for bytes or keys, and again when a signal ends the wait. One that comes
    between that look and the wait ends nothing: the program would stop only with the next bytes. A timer's signal ends
    every wait soon, Python looks again, and goes on waiting if there is nothing to do (PEP 475).
    """
    before = signal.signal(signal.SIGALRM, _look)
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _look(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: that Python looks at its signals is enough."""
