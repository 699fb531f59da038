"""Videos from texts and images, as jobs, for /v1/videos.

    create ──▶ a job and its lock, in the media directory ──▶ one picture with frames, made as any picture
    any frontend ──▶ reads the job; asks by a file that its owner cancels it; sends the video
    a frontend that is gone ──▶ its locks are free ──▶ another frontend, or the next one, begins its jobs again

A job is its frontend's own, which holds its lock and alone writes its file. So there is nothing to agree on, and a
frontend's end loses no job. media/jobs.py has the states. Frontends see one another's jobs if they share the directory.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.frontend.auth.accounts import TokenUse
from services.frontend.media.files import ID
from services.frontend.media.jobs import VideoJob
from services.frontend.media.locks import JobLock
from services.frontend.protocol import videos
from services.frontend.protocol.errors import Failure, failure_of, field_error
from services.frontend.requests.stream import InferenceRequest
from services.frontend.requests.terms import served_priority
from services.frontend.serving.picture_edits import images_of_video
from services.frontend.serving.pictures import SEEDS, ServingPictures, picture_request
from services.frontend.serving.reply import SILENCE, Chunk, Framing, Opening
from services.frontend.serving.request_context import RequestContext
from shared.errors import MALFORMED, HeadraceError, InvalidRequest, Overloaded, Unavailable
from shared.messages.generate import FRAMES_PER_S

TICK_S = 1.0
"""Seconds between two looks at what has become of a job."""
ADOPT_S = 5.0
"""Seconds between two looks for jobs whose frontend is gone."""
TRIES = 10
"""How often a job is tried that no worker takes or completes."""
PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
FULL_RETRY_S = 30.0
DELETED = b"deleted"
"""What is in the file that asks for a job's end if the job is deleted, too."""
READ_LIMIT = 4096
"""The newest files among which a list looks for videos."""
KEPT_CHARACTERS = 1000
"""The longest prompt of a job that is kept from one list to the next, so that 4,096 of them take a few MiB."""
SILENT_TICKS = 5
"""Looks without news after which a stream shows that it lives."""

_log = logging.getLogger(__name__)
_JOB = msgspec.json.Decoder(VideoJob)


class _Owned(Struct, eq=False):
    """A job that this frontend makes."""

    job: VideoJob
    lock: JobLock
    making: asyncio.Task[None] | None = None
    unwanted: bool = False


class ServingVideos:
    """Answers requests for videos, and makes them."""

    def __init__(self, pictures: ServingPictures) -> None:
        self.pictures = pictures
        self._service, self._models = pictures.service, pictures.models
        self._media, self._draw = pictures.media, pictures.draw
        self._owned: dict[str, _Owned] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: dict[str, VideoJob] = {}
        """The jobs of the latest list that were over, most of them: their files do not change any longer."""
        self._creating = asyncio.Lock()
        self._stopped = False

    async def run(self) -> None:
        """Begin jobs again whose frontend is gone, until cancelled; then this frontend's are left to others."""
        try:
            while self._media.directory is not None:
                try:
                    await self._adopt()
                except OSError as wrong:
                    _log.error("media.directory cannot be read: %s", wrong)
                await asyncio.sleep(ADOPT_S)
        finally:
            await self.stop()

    async def _adopt(self) -> None:
        """Begin jobs again whose frontend is gone."""
        looking = asyncio.create_task(asyncio.to_thread(self._orphans), name="orphans")
        try:
            found = await asyncio.shield(looking)
        except asyncio.CancelledError:
            for _, lock in await looking:
                lock.release(over=False)
            raise
        for job, lock in found:
            _log.info("video %s is made here from now on", job.id)
            self._begin(job.again(), lock)

    async def stop(self) -> None:
        """Leave all jobs of this frontend to others, and take no new ones."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- operations

    async def create(self, request: videos.VideoRequest, context: RequestContext) -> bytes:
        """Begin a job. Return its JSON. Raise InvalidRequest, Overloaded, RateLimited and Unavailable."""
        permit = context.permit
        priority = served_priority(request.priority, context.lowest_priority)
        permit.model = self._models.base_of(request.model)
        model, output = self._models.pictures_of(request.model)
        if not output.frames:
            why = f"{model!r} makes pictures: ask for them at /v1/images/generations"
            raise field_error("model", why, "unsupported_value")
        directory, given = self._directory(), images_of_video(request)
        seed = self._draw.randrange(SEEDS) if request.seed is None else request.seed
        picture = videos.video_of(request, output, seed)
        now = asyncio.get_running_loop().time()
        permit.check_least(picture.steps, 1, now)
        if given is not None:
            self.pictures.edits.check(given)
            picture = await self.pictures.edits.read(given, picture, output.multiple, context)
        async with self._creating:
            await self._check_room(permit.key)
            await self._media.check_room([picture])
            permit.add_tokens(picture.steps)
            permit.charge(picture.steps, now)
            permit.spent = TokenUse(picture.steps, 0, picture.steps)
            created_s = time.time()
            job = VideoJob(
                id=f"video_{secrets.token_hex(16)}",
                key=permit.key,
                model=model,
                picture=replace(picture, images=()),
                has_image=bool(picture.images),
                priority=priority,
                created_s=created_s,
                due_s=created_s + self._media.config.job_s,
            )
            # A client that goes leaves no half of a job: it is paid for, so it is made.
            keeping = asyncio.create_task(self._keep(job, directory, picture.images), name=f"keep {job.id}")
            self._tasks.add(keeping)
            keeping.add_done_callback(self._tasks.discard)
            await asyncio.shield(keeping)
        return msgspec.json.encode(self._shown(job))

    async def _keep(self, job: VideoJob, directory: Path, images: Sequence[bytes]) -> None:
        """Write a new job and its image, and begin it. Raise Overloaded if there is no room for the image, and
        Unavailable."""
        if self._stopped:
            raise Unavailable("this frontend ends")
        try:
            lock = await asyncio.to_thread(_new_lock, directory / f"{job.id}.lock")
        except OSError as wrong:
            raise Unavailable(f"media.directory cannot be written: {wrong.strerror}") from None
        try:
            await self._media.write({f"{job.id}.png": image for image in images})
            await self._save(job)
        except BaseException:
            lock.release(over=True)
            raise
        self._begin(job, lock)

    async def retrieve(self, body: bytes, context: RequestContext) -> bytes:
        """Return a job as JSON. Raise InvalidRequest."""
        return msgspec.json.encode(self._shown(await self._find(videos.decode_name(body), context.permit.key)))

    async def cancel(self, body: bytes, context: RequestContext) -> bytes:
        """Cancel a job that is not over. Return it as it is afterwards. Raise InvalidRequest and Unavailable."""
        job = await self._find(videos.decode_name(body), context.permit.key)
        if not job.is_over:
            job = await self._cancel(job)
        return msgspec.json.encode(self._shown(job))

    async def delete(self, body: bytes, context: RequestContext) -> bytes:
        """Cancel a job if it is not over, and remove it with its video. Raise InvalidRequest and Unavailable."""
        job = await self._find(videos.decode_name(body), context.permit.key)
        if not job.is_over:
            job = await self._cancel(job, DELETED)
        await self._media.remove(job.id, but=() if job.is_over else ("lock", "cancel"))
        return msgspec.json.encode(videos.VideoDeleted(job.id))

    async def list_page(self, body: bytes, context: RequestContext) -> bytes:
        """Return a page of a key's jobs as JSON. Raise InvalidRequest."""
        page = videos.decode_page(body)
        self._directory()
        jobs = [self._now(job) for job in await asyncio.to_thread(self._all) if job.key == context.permit.key]
        jobs.sort(key=lambda job: (job.created_s, job.id), reverse=page.order == "desc")
        if page.after:
            at = next((at for at, job in enumerate(jobs) if job.id == page.after), None)
            if at is None:
                raise _not_found(page.after, "after")
            jobs = jobs[at + 1 :]
        shown = [self._shown(job) for job in jobs[: int(page.limit)]]
        first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
        more = len(jobs) > len(shown)
        return msgspec.json.encode(videos.VideoList(data=shown, first_id=first, last_id=last, has_more=more))

    @asynccontextmanager
    async def events(self, body: bytes, context: RequestContext) -> AsyncIterator[VideoEvents]:
        """Follow a job: an event for each change, until it is over. Raise InvalidRequest."""
        job = await self._find(videos.decode_name(body), context.permit.key)
        context.announce(Opening("data"))
        yield VideoEvents(lambda: self._find(job.id, job.key), self._shown)

    async def content(self, name: str, key: str) -> Path:
        """Return the path of a complete video. Raise InvalidRequest."""
        job = await self._find(name, key)
        if job.status != "completed":
            wrong = f"the video {job.id} is not complete: {job.status}{f', {job.error}' if job.error else ''}"
            raise InvalidRequest(wrong, param="video_id", code="video_not_ready", status=404)
        return await self._media.find(f"{job.id}.mp4", key)

    # --- jobs of this frontend

    def _begin(self, job: VideoJob, lock: JobLock) -> None:
        owned = self._owned[job.id] = _Owned(job, lock)
        task = asyncio.create_task(self._own(owned), name=job.id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _own(self, owned: _Owned) -> None:
        """Make a job's video, keep it, and say in the job's file what became of it."""
        over = False
        try:
            ended = await self._ended(owned)
            await self._save(ended)
            over = True
            asked = await asyncio.to_thread(self._media.read, f"{ended.id}.cancel")
            kept = ("json", "lock", *(("mp4",) if ended.status == "completed" else ()))
            await self._media.remove(ended.id, but=() if asked == DELETED else kept)
            owned.job = ended
        except (HeadraceError, OSError) as wrong:
            _log.error("video %s: its end cannot be kept, so it is owned again: %s", owned.job.id, wrong)
        finally:
            del self._owned[owned.job.id]
            owned.lock.release(over=over)

    async def _ended(self, owned: _Owned) -> VideoJob:
        """Return a job at its end."""
        making = owned.making = asyncio.create_task(self._make(owned), name=f"make {owned.job.id}")
        saved = owned.job
        try:
            while not (await asyncio.wait({making}, timeout=TICK_S))[0]:
                if await asyncio.to_thread(self._media.has, f"{owned.job.id}.cancel"):
                    owned.unwanted = True
                    making.cancel()
                    continue
                owned.lock.touch()
                if owned.job != saved:
                    saved = owned.job
                    with suppress(Unavailable):  # the next step is saved again
                        await self._save(saved)
            if owned.unwanted and making.cancelled():
                return owned.job.ended("cancelled", time.time(), code="cancelled", error="its client cancelled it")
            making.result()
        except OSError as wrong:
            why = f"media.directory cannot be written: {wrong.strerror}"
            return owned.job.ended("failed", time.time(), code="unavailable", error=why)
        except HeadraceError as wrong:
            error = msgspec.json.decode(failure_of(wrong).payload)["error"]
            return owned.job.ended("failed", time.time(), code=error["code"] or error["type"], error=str(wrong))
        finally:
            making.cancel()
            await asyncio.wait({making})
        return owned.job.ended("completed", time.time())

    async def _make(self, owned: _Owned) -> None:
        """Make the video's file, unless it is there. While no worker can be had, wait. Raise what ends the job; OSError
        if the file cannot be written."""
        loop, job, pause_s = asyncio.get_running_loop(), owned.job, PAUSE_S
        if await asyncio.to_thread(self._media.has, f"{job.id}.mp4"):
            return None  # it is whole, and only its end could not be written before
        picture = job.picture
        if job.has_image:
            if (image := await asyncio.to_thread(self._media.read, f"{job.id}.png")) is None:
                raise Unavailable("the image that it is made from cannot be read in media.directory")
            picture = replace(picture, images=(image,))
        deadline = loop.time() + max(0.0, job.due_s - time.time())
        for tried in range(1, TRIES + 1):
            request = picture_request(
                f"{job.id}-{secrets.token_hex(4)}", job.model, picture, deadline, job.priority, is_patient=True
            )
            try:
                return await self._receive(owned, request)
            except (Unavailable, Overloaded):
                if tried == TRIES or loop.time() + pause_s >= deadline:
                    raise
                owned.job = owned.job.again()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise AssertionError("the last try has returned or raised")

    async def _receive(self, owned: _Owned, request: InferenceRequest) -> None:
        """Write the file as it comes, so that memory holds only what the disk has not taken yet."""
        with self._media.receive() as file, self._service.open(request) as stream:
            async for _ in stream:
                if stream.step:
                    owned.job = owned.job.advanced(stream.step)
                first, content = stream.take_file()
                if content:
                    await asyncio.to_thread(file.put, first, content)
            await self._media.complete(file, f"{owned.job.id}.mp4")

    async def _cancel(self, job: VideoJob, why: bytes = b"") -> VideoJob:
        """Cancel a job, also one that another frontend makes. Return it; it is over only if it is this frontend's."""
        await self._media.write({f"{job.id}.cancel": why}, bounded=False)
        owned = self._owned.get(job.id)
        if owned is None or owned.making is None:
            return job
        owned.unwanted = True
        owned.making.cancel()
        task = next((task for task in self._tasks if task.get_name() == job.id), None)
        if task is not None:
            await asyncio.wait({task})
        return owned.job

    # --- files

    def _directory(self) -> Path:
        if self._media.directory is None:
            raise InvalidRequest("videos need a place: set media.directory of the frontends", code="unsupported_value")
        return self._media.directory

    async def _save(self, job: VideoJob) -> None:
        await self._media.write({f"{job.id}.json": msgspec.json.encode(job)}, bounded=False)  # jobs are bounded

    async def _find(self, name: str, key: str) -> VideoJob:
        """Return a job of a key. Raise InvalidRequest with 404 for all else."""
        self._directory()
        owned = self._owned.get(name)
        job = owned.job if owned is not None else await asyncio.to_thread(self._read, name)
        if job is None or job.key != key:
            raise _not_found(name, "video_id")
        return job

    def _now(self, job: VideoJob) -> VideoJob:
        """Return what this frontend knows of a job, if it makes it."""
        owned = self._owned.get(job.id)
        return job if owned is None else owned.job

    def _read(self, name: str) -> VideoJob | None:
        """Return a job of a file. None if there is none. Blocks."""
        match = ID.fullmatch(name)
        content = None if match is None or match[1] != "video" else self._media.read(f"{name}.json")
        with suppress(*MALFORMED):
            return None if content is None else _JOB.decode(content)
        return None

    def _all(self) -> list[VideoJob]:
        """Return the jobs of the newest files. Blocks."""
        files = [name for name in self._media.names() if name.startswith("video_") and name.endswith(".json")]
        names, known = [name.removesuffix(".json") for name in files[:READ_LIMIT]], self._over
        found = (known.get(name) or self._read(name) for name in names)
        jobs = [job for job in found if job is not None]
        self._over = {job.id: job for job in jobs if job.is_over and len(job.picture.prompt) <= KEPT_CHARACTERS}
        return jobs

    def _locked(self) -> list[str]:
        """Return the ids of the jobs that have a lock's file: those that are not over. Blocks."""
        return [name.removesuffix(".lock") for name in self._media.names() if name.endswith(".lock")]

    async def _check_room(self, key: str) -> None:
        """Raise Overloaded if there are as many jobs as there may be."""
        config, names = self._media.config, await asyncio.to_thread(self._locked)
        if len(names) >= config.jobs:
            raise Overloaded(f"{len(names)} videos are not made yet (media.jobs)", retry_after_s=FULL_RETRY_S)
        jobs = await asyncio.to_thread(lambda: [self._read(name) for name in names])
        mine = sum(job is not None and job.key == key for job in jobs)
        if key and mine >= config.jobs_of_key:
            why = f"{mine} videos of the key {key} are not made yet (media.jobs_of_key)"
            raise Overloaded(why, retry_after_s=FULL_RETRY_S)

    def _orphans(self) -> list[tuple[VideoJob, JobLock]]:
        """Return the jobs whose frontend is gone, with their locks. Blocks."""
        found: list[tuple[VideoJob, JobLock]] = []
        assert self._media.directory is not None
        for name in self._locked():
            if name in self._owned:
                continue
            lock = JobLock.take(self._media.directory / f"{name}.lock")
            if lock is None:
                continue
            job = self._read(name)
            if job is None or job.is_over:
                lock.release(over=True)
            else:
                found.append((job, lock))
        return found

    def _shown(self, job: VideoJob) -> videos.Video:
        completed, picture = int(job.completed_s) or None, job.picture
        return videos.Video(
            id=job.id,
            model=job.model,
            status=job.status,
            progress=job.progress,
            created_at=int(job.created_s),
            completed_at=completed if job.status == "completed" else None,
            expires_at=int(job.completed_s + self._media.config.kept_s) if job.status == "completed" else None,
            prompt=picture.prompt,
            seconds=f"{picture.frames / FRAMES_PER_S:g}",
            size=f"{picture.width}x{picture.height}",
            seed=picture.seed,
            steps=picture.steps,
            error=videos.VideoError(job.code, job.error) if job.error else None,
        )


class VideoEvents(Struct):
    """What becomes of a job, as events; its methods are those of ChatReply."""

    look: Callable[[], object]
    """Returns a coroutine of the job as it is now."""
    shown: Callable[[VideoJob], videos.Video]

    @property
    def framing(self) -> Framing:
        """How chunks are framed over HTTP."""
        return "data"

    def keepalive_chunk(self) -> bytes:
        """Return an event that adds nothing."""
        return b"{}"

    def error_chunk(self, failure: Failure) -> bytes:
        """Return the last event of a stream that failed after it had begun."""
        return failure.payload

    def wake(self) -> None:
        """Do nothing: `chunks` shows by itself that the stream lives."""

    async def chunks(self, _send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:
        """Yield the job whenever it has changed, until it is over or deleted. Raise InvalidRequest once it is
        deleted."""
        before, silent = b"", 0
        while True:
            job = await self.look()  # type: ignore[misc]
            assert isinstance(job, VideoJob)
            event = msgspec.json.encode(self.shown(job))
            if event != before:
                before, silent = event, 0
                yield Chunk(event, more=job.is_over, last=job.is_over)
            elif (silent := silent + 1) % SILENT_TICKS == 0:
                yield Chunk(SILENCE)
            if job.is_over:
                return
            await asyncio.sleep(TICK_S)


def _new_lock(path: Path) -> JobLock:
    """Return the lock of a new job. Blocks. Raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = JobLock.take(path, create=True)
    assert lock is not None, "its name is new"
    return lock


def _not_found(name: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"Video with id {name[:64]!r} not found.", param=param, code="video_not_found", status=404)
