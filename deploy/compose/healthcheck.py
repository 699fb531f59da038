"""A container's health check: `healthcheck.py URL`, or `healthcheck.py FILE` where FILE holds the URL.

Exit status 0 if /health there answers 200. A script of its own, run with `-I -S`, as it starts every few seconds.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Docker gives containers the proxies of its client's settings, and none of them reaches this one."""


def main() -> int:
    """Says why on stdout; `docker inspect` shows it."""
    try:
        where = sys.argv[1]
        url = where if where.startswith("http://") else Path(where).read_text(encoding="utf-8").strip()
        with DIRECT.open(f"{url}/health", timeout=4.0) as answer:
            print(answer.read(1000).decode(errors="replace"))
            return 0
    except urllib.error.HTTPError as refused:
        print(refused.read(1000).decode(errors="replace"))
    except OSError as wrong:
        print(wrong)
    return 1


if __name__ == "__main__":
    sys.exit(main())
