"""The files that `up` keeps."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

CACHE_VARIABLE = "HEADRACE_CACHE"
"""The environment variable with the directory of models; it is no setting of a service."""
DEFAULT_HOME = Path(__file__).resolve().parents[2] / ".headrace"


class StateDirectory(Struct, frozen=True):
    """The directory where `up` keeps its state (`--state`): `.headrace` in the checkout by default."""

    home: Path

    @property
    def run(self) -> Path:
        """The directory that each `up` empties at its start and writes again."""
        return self.home / "run"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def models(self) -> Path:
        """The directory in which earlier versions kept models; it is used if it is there."""
        return self.home / "models"

    @property
    def record(self) -> Path:
        """The file that says what runs now, for `status`, `chat` and people."""
        return self.run / "up.json"

    @property
    def fleet(self) -> Path:
        """The settings with which a further process joins this fleet, the password of NATS included."""
        return self.run / "fleet.toml"
