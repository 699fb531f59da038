"""`headrace bench plot FILE…`: shows the loads of several files next to each other, as tables and as one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from deploy.local.bench.exports import differences, read_bench
from deploy.local.bench.ratios import ratios, render_ratios
from deploy.local.bench.rows import render
from deploy.local.bench.sweep import draw_rows
from deploy.local.size.files import read_given
from shared.errors import ConfigError

FILES_LIMIT = 32
FILE_LIMIT_BYTES = 64 << 20


def plot_files(names: Sequence[str], out: str) -> int:
    """Print the tables of all files, draw their curves to `out`.png, and return the exit status. Raise ConfigError."""
    if not 1 <= len(names) <= FILES_LIMIT or len(set(names)) < len(names):
        raise ConfigError(f"bench plot takes 1 to {FILES_LIMIT} different files")
    files = {name: read_bench(read_given(Path(name), FILE_LIMIT_BYTES), name) for name in names}
    rows = [
        replace(row, variant=" ".join(filter(None, (name.removesuffix(".json"), row.variant))))
        for name, file in files.items()
        for row in file.rows
    ]
    variants = list(dict.fromkeys(row.variant for row in rows))
    found = ratios(rows, variants)
    print("\n".join([render(rows), *(["", render_ratios(found, variants[0])] if found else []), *differences(files)]))
    draw_rows(rows, out)
    return 0
