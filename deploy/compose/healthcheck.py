"""The health check of a container: `healthcheck.py URL`, or `healthcheck.py FILE` where FILE holds the URL.

Exits with status 0 if /health there answers 200. It is a small script, run with `-I -S`, because it starts every few
seconds.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""An opener without proxies. Docker gives containers the proxies of its client, which cannot reach this container."""


def main() -> int:
    """Print the answer to stdout, where `docker inspect` shows it; return the exit status."""
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
