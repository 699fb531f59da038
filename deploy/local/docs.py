"""`headrace docs`: prints a document as Markdown, from the checkout or the package."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from deploy.local.table import table
from shared.errors import ConfigError
from shared.installation import COMMAND, TREE

PLACES = ("*.md", "docs/*.md", "docs/decisions/*.md", "deploy/compose/*.md", "benchmarks/*.md")


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
    """Return the text of a document. Raise ConfigError, which has the nearest topics, if there is none."""
    found = topics(tree)
    if file := found.get(_topic(topic)):
        return file.read_text(encoding="utf-8")
    near = get_close_matches(_topic(topic), found, n=3, cutoff=0.5)
    instead = f"did you mean {' or '.join(near)}?" if near else f"`{COMMAND} docs` lists them"
    raise ConfigError(f"docs {topic}: no such document; {instead}")


def listing(tree: Path = TREE) -> str:
    """Return a table of the topics and the first line of each document."""
    rows = []
    for topic, file in topics(tree).items():
        with file.open(encoding="utf-8") as lines:
            rows.append((topic, lines.readline().strip("# \n")))
    return table("TOPIC  DOCUMENT", rows)


def show(topic: str | None) -> None:
    """Print a document; without a topic, the table of them."""
    if topic is None:
        print(listing())
    else:
        print(text_of(topic), end="")
