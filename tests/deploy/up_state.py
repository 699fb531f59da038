"""What an `up` with discovery in files has written, without the `up`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.local.stack.stack import toml
from tests.servers import nats_server


@contextmanager
def up_state(folder: Path) -> Iterator[Path]:
    """Yield its directory of state, in `folder`, while a NATS runs. Discovery is in `run/discovery` below it."""
    run = folder / "state" / "run"
    (run / "discovery").mkdir(parents=True)
    with nats_server(folder) as server:
        run.joinpath("up.json").write_text(f'{{"nats": "{server.url}"}}')
        files = {"backend": "file", "path": str(run / "discovery")}
        run.joinpath("fleet.toml").write_text(toml({"nats": {"url": server.url}, "discovery": files}))
        yield folder / "state"
