"""CUDA sources as NVRTC gets them: one text each, with its headers and constants.

CuPy keeps compiled kernels by their text and options. So a header, which an update may change, is part of the text. A
constant that a source does not name is not: `choose.cu` takes longest to compile, and is the same for all models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).parent / "kernels"
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


def source_text(name: str, constants: Mapping[str, object]) -> str:
    """Return the source `name`.cu with its headers, below those of `constants` that they name."""
    text = _with_headers(f"{name}.cu", set())
    named = set(re.findall(r"\w+", text))
    defined = [f"#define {constant} {value}\n" for constant, value in constants.items() if constant in named]
    return "".join((*defined, text))


def _with_headers(file: str, seen: set[str]) -> str:
    """Return the text of a file in which headers are replaced by their text, each at its first place."""
    if file in seen:
        return ""
    seen.add(file)
    text = (SOURCES / file).read_text(encoding="utf-8").replace("#pragma once\n", "")
    return _INCLUDE.sub(lambda found: _with_headers(found[1], seen), text)
