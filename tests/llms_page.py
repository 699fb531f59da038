"""llms.txt, which lists the documents for language models, from docs/README.md: `python -m tests.llms_page` writes it.

llmstxt.org has the format.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "llms.txt"
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
_CODE = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def written() -> str:
    """Return the page: each document once, in the section that names it first, with all that it is for."""
    index = ROOT / "docs" / "README.md"
    sections: dict[str, list[str]] = {}
    tasks: dict[str, list[str]] = {}
    section = ""
    for line in index.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        task, links = _row(line)
        for link in links:
            path = (index.parent / link).resolve()
            name = str((path / "README.md" if path.is_dir() else path).relative_to(ROOT))
            if name not in tasks:
                sections.setdefault(section, []).append(name)
            known = tasks.setdefault(name, [])
            if task not in known:
                known.append(task)
    listed = [
        f"## {title}\n\n" + "".join(f"- [{_title(name)}]({name}): {'; '.join(tasks[name])}\n" for name in names)
        for title, names in sections.items()
    ]
    return "\n".join([_head(), *listed])


def _row(line: str) -> tuple[str, list[str]]:
    """Return the task of a row of a table, and the documents that it names; no documents for any other line."""
    cells = line.strip("|").split(" | ")
    if not line.startswith("| ") or len(cells) != 2:
        return "", []
    return _CODE.sub(r"\1", cells[0].strip()), _LINK.findall(cells[1])


def _title(name: str) -> str:
    with (ROOT / name).open(encoding="utf-8") as lines:
        return lines.readline().strip("# \n")


def _head() -> str:
    """Return the title and the first paragraph of the README, as one quote."""
    title, first = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[:2]
    how = "`headrace docs TOPIC` prints a document, such as `headrace docs gpu`."
    return f"{title}\n\n> {' '.join(first.split())}\n\n{how}\n"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
