"""Pictures of figures as PNG files: all that the command asks of matplotlib, which is optional."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shared.installation import BIN

HINT = f"to draw it, run `{BIN}pip install matplotlib`"


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, with its size in inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["text.parse_math"] = False  # a name may have two $
    return Figure(figsize=(width, height))


def save(figure: Any, path: Path) -> None:
    """Write a figure to a PNG file."""
    figure.savefig(path, dpi=110)
