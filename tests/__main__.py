"""All tests: `.venv/bin/python -m tests` runs each directory of them in a pytest of its own, as many at once as there
are cores. What one waits for, another one uses: on two cores that is little more than half the time. Arguments go to
every pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
LONGEST = ("integration", "simulation", "chaos")
"""They begin first, so that none of them is still running when all others have ended."""
NOTHING_TO_RUN = 5
"""pytest's status where no test fits the arguments."""
WORDS = ("failed", "error", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning")
"""Of pytest's last line; what went wrong comes first."""


def parts(root: Path = HERE) -> list[tuple[Path, ...]]:
    """What one pytest runs, in order: a directory, or the files that are in none. Together all tests there are."""
    directories = sorted(path for path in root.iterdir() if path.is_dir() and any(path.rglob("test_*.py")))
    directories.sort(key=lambda path: LONGEST.index(path.name) if path.name in LONGEST else len(LONGEST))
    return [*((path,) for path in directories), tuple(sorted(root.glob("test_*.py")))]


def counted(last_lines: Sequence[str]) -> str:
    """What pytests say in the end, added up."""
    said = "\n".join(last_lines)
    totals = {word: sum(map(int, re.findall(rf"(\d+) {word}", said))) for word in WORDS}
    return ", ".join(f"{total} {word}" for word, total in totals.items() if total) or "no tests"


def _run(part: Sequence[Path], arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # Without its cache: pytests that run at once would write over each other's.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, *map(str, part)]
    return subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def main(arguments: Sequence[str], root: Path = HERE) -> int:
    """Exit status: 0 if none failed. What each pytest says is shown when it has ended."""
    began_s = time.monotonic()
    last_lines: list[str] = []
    failed = False
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = [pool.submit(_run, part, arguments) for part in parts(root)]
        try:
            for ended in as_completed(running):
                result = ended.result()
                print(result.stdout, flush=True)
                last_lines.append(result.stdout.rstrip().rpartition("\n")[2])
                failed = failed or result.returncode not in (0, NOTHING_TO_RUN)
        except KeyboardInterrupt:  # it went to all that run, as they are of the same process group
            pool.shutdown(cancel_futures=True)
            return 130
    print(f"{counted(last_lines)} in {time.monotonic() - began_s:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
