"""Names can be searched: a public class name is there once in the product."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("services", "shared", "deploy")
TWINS = {
    "Message": "OpenAI's name of a schema in the OpenAPI document, and NATS's name of what a bus carries",
}
"""Public class names that are there twice, and why."""


def classes(*folders: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """The classes at the top of each module below the folders, with the module's path."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    yield str(path.relative_to(ROOT)), node


def test_a_public_class_name_is_there_once_in_the_product() -> None:
    places = defaultdict(list)
    for path, node in classes(*PRODUCT):
        if not node.name.startswith("_"):
            places[node.name].append(path)
    twins = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert {name: paths for name, paths in twins.items() if name not in TWINS} == {}
    assert twins.keys() == TWINS.keys(), "a name that is there once needs no reason"
