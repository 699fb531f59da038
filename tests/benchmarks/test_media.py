"""benchmarks/media.py: the ratio is that of neighbours, and is held against its goal."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import pytest

from benchmarks.media import goals_of, headrace_rate, write_model
from shared.errors import Unavailable
from tests.worker.diffusers.environment import PYTHON, needs_diffusers


def test_the_ratio_is_the_median_of_neighbours() -> None:
    slow, fast = {"alone": 1.0, "headrace": 0.98}, {"alone": 10.0, "headrace": 9.0}
    [goal] = goals_of([slow, slow, fast])
    assert (goal.value, goal.met) == (0.98, True)
    assert not goals_of([slow, fast, fast])[0].met


@needs_diffusers
def test_the_tiny_pipeline_is_one_of_diffusers(tmp_path: Path) -> None:
    assert (write_model(PYTHON, "tiny", tmp_path) / "model_index.json").exists()


def test_a_picture_that_fails_ends_the_measurement_with_what_was_answered() -> None:
    """The sixth one: by then the clients of two batches are all at work."""
    numbers = count()

    class Pictures(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer = b'{"error": "no memory"}'
            self.send_response(200 if next(numbers) < 5 else 503)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_arguments: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            with pytest.raises(Unavailable, match=r'status 503: \{"error": "no memory"\}'):
                headrace_rate(f"http://127.0.0.1:{server.server_port}", {}, 2, 0.0)
        finally:
            server.shutdown()
            serving.join()
