"""The memory and the commands of a conversation. Pure."""

from __future__ import annotations

from shared.errors import ConfigError

HELP = {
    "/clear": "forget what was said",
    "/model NAME": "ask another model; without NAME: show which there are",
    "/system TEXT": "set the system prompt; without TEXT: remove it",
    "/help": "show this",
    "/exit": "end, as Ctrl-D does; Ctrl-C ends an answer, or at the prompt the program",
}
"""Command → what it does."""
_NAMES = tuple(command.split()[0] for command in HELP)


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
