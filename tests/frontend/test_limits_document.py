"""docs/limits.md says for each limit which module holds it, and the numbers there are those of the page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "limits.md"
UNITS = {"": 1, "k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)(?: (Ki|Mi|KiB|MiB|GiB|k|M)\b)?")
PLACE = re.compile(r"`([\w/]+\.py)`(?:: (`\w+`(?:, `\w+`)*))?")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| setting"))
]
SETTING = re.compile(r"`(?:\w+\.)?(\w+)`")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2])
def test_the_place_of_a_limit_holds_its_number_or_reads_its_setting(row: list[str]) -> None:
    places = PLACE.findall(row[-1])
    assert places or row[-1] == "aiohttp"
    texts = {place: source(place) for place, _ in places}
    numbers = {float(number.replace(",", "")) * UNITS[unit] for number, unit in NUMBER.findall(row[1])}
    for place, names in places:
        values = {name: constant(texts[place], name) for name in re.findall(r"\w+", names)}
        assert {name: value for name, value in values.items() if value not in numbers} == {}
    if setting := SETTING.match(row[0]):
        assert any(re.search(rf"\b(most_|_)?{setting[1]}\b", text) for text in texts.values())


def source(place: str) -> str:
    path = ROOT / place if place.startswith("shared/") else ROOT / "services" / place
    return path.read_text(encoding="utf-8")


def constant(text: str, name: str) -> float | None:
    """The value of a module's constant; None if it has none of that name that is a number."""
    for node in ast.parse(text).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == name and isinstance(node, (ast.Assign, ast.AnnAssign)):
            assert node.value is not None
            return float(eval(compile(ast.Expression(node.value), name, "eval"), {"__builtins__": {}}))
    return None
