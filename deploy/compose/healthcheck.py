"""A container's health check: `healthcheck.py URL`, or `healthcheck.py FILE` where FILE holds the URL.

Exit status 0 if /health there answers 200. A script of its own, run with `-I -S`, as it starts every few seconds.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path


def main() -> int:
    """Says why on stdout; `docker inspect` shows it."""
    try:
        where = sys.argv[1]
        url = where if where.startswith("http://") else Path(where).read_text(encoding="utf-8").strip()
        with urllib.request.urlopen(f"{url}/health", timeout=4.0) as answer:  # noqa: S310 the URL is our own service's
            print(answer.read(1000).decode(errors="replace"))
            return 0
    except urllib.error.HTTPError as refused:
        print(refused.read(1000).decode(errors="replace"))
    except OSError as wrong:
        print(wrong)
    return 1


if __name__ == "__main__":
    sys.exit(main())
