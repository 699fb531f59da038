"""Tables that people read in a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """Return rows below their head, in left-aligned columns. The names in `head` have two spaces between them; a cell
    that is None is empty. Raise ValueError if a row has another number of cells than the head."""
    cells = [head.split("  "), *(["" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def narrowed(head: str, rows: Iterable[Iterable[object]], columns: int, spare: Sequence[str]) -> str:
    """Return a table without as many of the `spare` columns, in their order, as it takes to fit into `columns`
    characters."""
    kept = list(zip(head.split("  "), *rows, strict=True))
    for name in (*spare, None):
        names, *left = zip(*kept, strict=True)
        shown = table("  ".join(names), left)
        if name is None or max(map(len, shown.splitlines())) <= columns:
            return shown
        kept = [column for column in kept if column[0] != name]
    raise AssertionError("the last name is None")


def age(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least one."""
    if seconds < 60:
        return f"{seconds:.0f}s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}m"
    if seconds < 86400:
        return f"{seconds // 3600:.0f}h"
    return f"{seconds // 86400:.0f}d"


def size(size_bytes: float) -> str:
    """Return a size in the largest unit of which it has at least one."""
    for unit in ("B", "kB", "MB"):
        if size_bytes < 999.5:  # a number that rounds to 1000 takes the next unit
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} GB" if size_bytes < 999.5 else f"{size_bytes:.0f} GB"
