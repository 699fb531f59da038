"""An engine program whose model breaks it while it is loaded: `python -m tests.worker.breaking_engine …`."""

from __future__ import annotations

import sys
from typing import NoReturn

from services.worker import engine_main


def _break(*_: object, **_more: object) -> NoReturn:
    raise RuntimeError("weights\nof two lines")


if __name__ == "__main__":
    engine_main._load = _break
    sys.exit(engine_main.main(sys.argv[1:]))
