"""`headrace docs`: prints a document as Markdown, from the checkout or the package, or names those on a subject."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from deploy.local.table import table
from shared.errors import ConfigError
from shared.installation import COMMAND, TREE

PLACES = ("*.md", "docs/*.md", "docs/decisions/*.md", "deploy/compose/*.md", "benchmarks/*.md", "examples/**/*.md")
INDEX = "docs"
"""The topic of the document whose tables say which task each document is for."""
LAST = ("decisions/", "where", "changelog")
"""What the topics begin with that come after all others: they name nearly everything."""
SUBJECTS = 5
"""The most documents that a subject is answered with."""
_ENDING = re.compile(r"(?:ings?|ed|e?s|ies|y|e)$")
_SHORTEST = 3
"""The fewest letters that a word keeps without its ending."""
_COMMON = frozenset(
    ("a", "an", "and", "do", "for", "how", "i", "in", "is", "my", "of", "on", "or", "the", "to", "what", "with")
)
"""Words that say nothing of a subject."""


def topics(tree: Path = TREE) -> dict[str, Path]:
    """Return the documents by topic: `gpu` is docs/gpu.md, `decisions` docs/decisions/README.md, `readme` README.md."""
    found = {_topic(str(file.relative_to(tree))): file for place in PLACES for file in sorted(tree.glob(place))}
    if not found:
        raise ConfigError("docs: the documents are in the checkout and the package, and not here")
    return found


def _topic(name: str) -> str:
    """Return the topic of a document or a link, such as `gpu` of docs/gpu.md#settings."""
    topic = name.partition("#")[0].lower().removeprefix("./").removeprefix("../").removesuffix(".md")
    topic = topic.removeprefix("docs/") if topic != "docs/readme" else "docs"
    return topic.removesuffix("/readme")


def text_of(topic: str, tree: Path = TREE) -> str:
    """Return the text of a document. Raise ConfigError if there is none, which has the documents with that subject,
    else those whose topics are spelled like it."""
    found = topics(tree)
    if file := found.get(_topic(topic)):
        return file.read_text(encoding="utf-8")
    texts = {name: file.read_text(encoding="utf-8") for name, file in found.items()}
    if about := documents_about(topic, texts):
        instead = f"it is a subject of {', '.join(f'{name} ({line})' for name, line in about.items())}"
    elif written := _mentions(topic, texts):
        instead = f"it is mentioned in {', '.join(written)}"
    elif near := get_close_matches(_topic(topic), found, n=3):
        instead = f"did you mean {' or '.join(near)}?"
    else:
        instead = f"`{COMMAND} docs` lists them"
    raise ConfigError(f"docs {topic}: no such document; {instead}")


def documents_about(subject: str, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the topics of at most SUBJECTS documents that have all words of the subject, each with the line that has
    them: first those with a name and title, then with a heading, then with a task of the index. *Pure.*"""
    wanted = _stems(subject)
    lines = [
        (topic, min(number, 1), heading)
        for topic, text in texts.items()
        for number, heading in enumerate(_headings(text))
        if wanted <= _stems(heading if number else f"{topic} {heading}")
    ]
    lines += [(topic, 2, task) for task, topic in _tasks(texts.get(INDEX, "")) if wanted <= _stems(task)]
    ranked: dict[str, str] = {}
    for topic, _, line in sorted(lines, key=lambda line: (line[0].startswith(LAST), line[1])):
        ranked.setdefault(topic, line)
    return {topic: ranked[topic] for topic in [*ranked][:SUBJECTS]} if wanted else {}


def _mentions(subject: str, texts: Mapping[str, str]) -> list[str]:
    """Return the topics of the documents that have all words of the subject in most lines."""
    wanted = _stems(subject)
    counts = {topic: sum(wanted <= _stems(line) for line in text.splitlines()) for topic, text in texts.items()}
    found = [topic for topic, count in counts.items() if wanted and count]
    return sorted(found, key=lambda topic: (topic.startswith(LAST), -counts[topic]))[:SUBJECTS]


def _headings(text: str) -> list[str]:
    """Return the headings of a document, its title first."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [heading.replace("`", "") for heading in re.findall(r"^#+ +(.+)$", prose, re.M)]


def _tasks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the tasks in the tables of the index, each with the topic of the first document that its row links to."""
    for task, link in re.findall(r"^\| (.+?) \| .*?\]\(([^)\s]+)\)", text, re.M):
        yield re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", task).replace("`", ""), _topic(link)


def _stems(text: str) -> set[str]:
    """Return the words of a text without the endings that they have in other forms."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    stems = ((word, _ENDING.sub("", word)) for word in words if word not in _COMMON)
    return {stem if len(stem) >= _SHORTEST else word for word, stem in stems}


def listing(tree: Path = TREE) -> str:
    """Return a table of the topics and the first line of each document."""
    rows = []
    for topic, file in topics(tree).items():
        with file.open(encoding="utf-8") as lines:
            rows.append((topic, lines.readline().strip("# \n")))
    return table("TOPIC  DOCUMENT", rows)


def show(topic: str) -> None:
    """Print a document; with an empty topic, the table of them."""
    print(text_of(topic) if topic else listing() + "\n", end="")
