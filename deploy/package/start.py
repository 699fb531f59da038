"""The commands of the wheel: each puts the tree of packages on the path of its process, then starts the program.

This is `headrace/__main__.py` of the wheel. The tree is in `headrace/tree`, so that site-packages has no `services`,
`shared` and `deploy`. PYTHONPATH hands it to the programs that this one starts.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

TREE = str(Path(__file__).resolve().with_name("tree"))


def main() -> int:
    """Run `headrace COMMAND …` and return its exit status."""
    _put_on_path()
    status: int = import_module("deploy.local.cli").main()
    return status


def frontend() -> None:
    """Run a frontend."""
    _serve("frontend")


def router() -> None:
    """Run a router."""
    _serve("router")


def worker() -> None:
    """Run a worker."""
    _serve("worker")


def kvbm() -> None:
    """Run a block store."""
    _serve("kvbm")


def _serve(service: str) -> None:
    _put_on_path()
    import_module(f"services.{service}.__main__").main()


def _put_on_path() -> None:
    sys.path.insert(0, TREE)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (TREE, os.environ.get("PYTHONPATH"))))


if __name__ == "__main__":
    sys.exit(main())
