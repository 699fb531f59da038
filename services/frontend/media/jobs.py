"""A video's job, as its file in the media directory has it, and what may become of it. Pure.

queued ──▶ in_progress ──▶ completed        its file is there
  │             │  ├─────▶ failed           it was not made in time, or was refused
  └─────────────┴──┴─────▶ cancelled        its key asked for that

video_ID.json      the job; its owner alone writes it
video_ID.lock      held (flock) by the frontend that owns the job, for as long as the job is not over
video_ID.cancel    written by any frontend: the job is not wanted any longer
video_ID.png       the image that it is made from, if there is one, until the job is over
video_ID.mp4       the video
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from shared.messages.generate import Picture

JobStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
UNFINISHED: frozenset[JobStatus] = frozenset(("queued", "in_progress"))


class VideoJob(Struct, frozen=True, kw_only=True):
    """A video's job, from its request until its files are removed."""

    id: str
    key: str
    """The name of the API key that made it. Empty without keys."""
    model: str
    picture: Picture
    """The video, without its image."""
    has_image: bool = False
    """True if it is made from an image, which has a file of its own."""
    priority: int
    created_s: float
    """Seconds since 1970, as the other times."""
    due_s: float
    """When it fails if it is not complete."""
    status: JobStatus = "queued"
    step: int = 0
    completed_s: float = 0.0
    error: str = ""
    code: str = ""

    @property
    def is_over(self) -> bool:
        return self.status not in UNFINISHED

    @property
    def progress(self) -> int:
        """How much is done, in percent. What comes after the last step counts as one more."""
        return 100 if self.status == "completed" else 100 * self.step // (self.picture.steps + 1)

    def advanced(self, step: int) -> VideoJob:
        """Return it after a step."""
        return replace(self, status="in_progress", step=step)

    def again(self) -> VideoJob:
        """Return it as it begins again, perhaps at another frontend."""
        return replace(self, status="queued", step=0)

    def ended(self, status: JobStatus, now_s: float, *, code: str = "", error: str = "") -> VideoJob:
        """Return it at its end."""
        assert status not in UNFINISHED
        return replace(self, status=status, completed_s=now_s, code=code, error=error)
