"""The engine's process: `python -m services.worker.engine_main CONFIG_JSON SOCKET_FD`.

    load ──▶ first tokens ──▶ serve
                   └── stands by: KV given back ──StandingBy──▶ waits ──TakeOver──▶ KV ──▶ serve

The shell starts it with an environment that bounds the arithmetic threads before NumPy is imported; hence the imports
inside functions here. It ends on Shutdown, when the runner fails, and when the shell dies.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import assert_never

import msgspec

from services.worker.config import NO_IMAGES, EngineConfig, WorkerConfig
from services.worker.contracts.messages import FIRST_TOKENS, Failed, Loading, Ready, Shutdown, StandingBy, TakeOver
from services.worker.contracts.runner import CopiesInRanks, EmbeddingLookups, Runner
from services.worker.engine.channel import ChannelClosed, EngineEnd
from services.worker.engine.core import EngineCore, store_layout
from services.worker.engine.loop import EngineLoop
from services.worker.engine.program import run_program, start_logs
from services.worker.engine.warm_up import warm_up
from services.worker.kv_connector.embedding_lookups import THREADS, ThreadedLookups
from services.worker.kv_connector.embedding_store import OWED_LIMIT, KvbmEmbeddings
from services.worker.kv_connector.pool_attachment import PoolAttachment
from services.worker.kv_connector.socket_client import SocketClient
from services.worker.model_facts import find_facts
from services.worker.scheduler.encoder_cache import EncodesImages
from services.worker.sharing.block_reader import BlockReader
from services.worker.sharing.block_sharer import BlockSharer
from services.worker.sharing.memory import HasSharableMemory
from services.worker.sharing.messages import SharingIdentity
from services.worker.sharing.page_sharer import SharableBlocks
from services.worker.sharing.shares import SharingLimits
from shared.errors import ConfigError, ModelError
from shared.installation import install_command
from shared.messages.cards import KvLayout
from shared.messages.kvbm import StoreLayout

_log = logging.getLogger(__name__)
SWITCH_INTERVAL_S = 1e-4
"""Seconds after which a copying thread gets the interpreter while the loop goes on. With a free core it began 0.22 ms
after the request, and not only when the loop was through, as with Python's 5 ms. On an H200 a step during incessant
copies in both directions took 2 to 4 % longer because of it, on a CPU no longer; 0.02 ms gained nothing more."""


WAKE_LIMIT_S = 5.0
"""Seconds for which no more of a GPU's memory may come free while the KV of an engine that has ended is waited for. The
worker waits twice as long for a word."""
SHARED_PART = 4
"""The engine's blocks divided by this are the most that are shared at once: requests cannot use blocks that a frozen
reader keeps."""


def main(arguments: list[str]) -> int:
    """Return the exit status, as `run_program` does."""
    return run_program(arguments, _run)


def _run(config: EngineConfig, channel: EngineEnd) -> Failed | None:
    """Run the engine until it ends. Return why it failed, or None after Shutdown. Raise ChannelClosed."""
    number = None
    if config.worker.kvbm.pool:  # before CUDA opens its files: `shared.pool.lock` says why
        number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        runner = _load(config.worker, channel.send, stands_by=config.stands_by)
    except (ModelError, ConfigError) as wrong:
        return Failed(reason=str(wrong), model=True)
    except ChannelClosed:
        raise
    except Exception as wrong:  # noqa: BLE001 - the engine's edge, as below
        _log.exception("the model cannot be loaded")
        return Failed(reason=f"{type(wrong).__name__}: {wrong}")
    with closing(runner):
        try:
            _check_probe(config.worker, runner)
            if config.worker.role == "encode" and runner.facts.images is None:
                raise ConfigError(NO_IMAGES)
            serving = _stand_by(config, channel, runner) if config.stands_by else config
            if serving is not None:
                _serve(serving, channel, runner, number)
        except ChannelClosed:
            raise
        except ConfigError as wrong:
            return Failed(reason=str(wrong), model=True)
        except Exception as wrong:  # noqa: BLE001 - the engine's edge: the shell learns of every failure of a runner
            _log.exception("the engine failed")
            first = _first(wrong)
            return Failed(reason=f"{type(first).__name__}: {first}")
    return None


def _first(wrong: BaseException) -> BaseException:
    """Return the error of the runner where ending it failed as well: no copy of a lost GPU can be awaited."""
    before: BaseException | None = wrong
    while before is not None and not isinstance(before, ModelError):
        before = before.__context__
    return before or wrong


def _load(config: WorkerConfig, report: Callable[[Loading], None], *, stands_by: bool = False) -> Runner:
    """Return the runner that the settings name. Raise ModelError, ConfigError."""
    match config.engine:
        case "echo":
            from services.worker.simulated.runner import EchoRunner

            return EchoRunner(find_facts(config, report))
        case "simulated":
            from services.worker.simulated.runner import SimulatedRunner, simulated_model

            return SimulatedRunner(simulated_model(find_facts(config, report), config.simulated))
        case "native" if config.device == "cuda":
            try:
                from services.worker.native.cuda.load import load_cuda
            except ImportError as wrong:
                raise ConfigError(f"device is cuda, which needs CuPy: {install_command('gpu')} ({wrong})") from None
            return load_cuda(config, report, stands_by=stands_by)
        case "native":
            from services.worker.native.runner import load_native

            return load_native(config, report)
        case "vllm" | "attached" | "diffusers":
            raise ConfigError(f"engine is {config.engine}, which this program does not run")
        case _:
            assert_never(config.engine)


def _check_probe(config: WorkerConfig, runner: Runner) -> None:
    """Raise ConfigError if the model cannot be asked what the settings have an idle engine asked."""
    facts = runner.facts
    wrong_probe = config.health.fault(vocab_size=facts.vocab_size, context_length=facts.context_length)
    if wrong_probe and config.engine == "native":
        raise ConfigError(wrong_probe)


def _stand_by(config: EngineConfig, channel: EngineEnd, runner: Runner) -> EngineConfig | None:
    """Do all of a start but what needs KV, a kvbm or other engines, and wait for TakeOver, without a limit. Return the
    settings to serve with, or None after Shutdown. Raise ModelError, ChannelClosed."""
    _compute_first_tokens(config.worker, channel, runner)
    if failed := runner.operate("sleep", "", "", 1):
        raise ModelError(failed)
    gc.collect()
    waiting = StandingBy(_own_bytes())
    channel.send(waiting)
    while True:
        for command in channel.receive(None):
            if isinstance(command, Shutdown):
                return None
            if isinstance(command, TakeOver):  # what came with it is about attempts of the engine before
                _wake(runner, max(WAKE_LIMIT_S, config.worker.stall_s), lambda: channel.send(waiting))
                serving = msgspec.structs.replace(config, instance=command.instance)
                start_logs(serving)
                return serving


def _wake(runner: Runner, limit_s: float, alive: Callable[[], None]) -> None:
    """Take the KV of an engine that has just ended: a GPU has its memory again a moment after the process is gone.
    While more and more of it is free this goes on for up to `limit_s`, and `alive` is called. Raise ModelError."""
    begun_s = grown_s = time.monotonic()
    free = -1
    while failed := runner.operate("wake", "", "", 1):
        use, now_s = runner.memory_use(), time.monotonic()
        if use is not None and use.free > free:
            free, grown_s = use.free, now_s
            alive()
        if use is None or now_s - grown_s > WAKE_LIMIT_S or now_s - begun_s > limit_s:
            raise ModelError(failed)
        time.sleep(0.02)


def _own_bytes() -> int:
    """Return the bytes of memory that this process shares with no other one. 0 if the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


def _compute_first_tokens(config: WorkerConfig, channel: EngineEnd, runner: Runner) -> None:
    if config.engine == "native":
        channel.send(Loading(FIRST_TOKENS, 0.9))
        warm_up(runner, config.device)


def _serve(config: EngineConfig, channel: EngineEnd, runner: Runner, number: int | None) -> None:
    """Run the engine's loop until Shutdown; `number` is a descriptor for the lock in the kvbm's pool, if there is one.
    Raise ConfigError, and what the runner raises."""
    attachment = mover = share_reader = sharer = kvbm = embeddings = None
    facts = runner.facts
    if config.worker.role == "encode":
        facts = msgspec.structs.replace(facts, capacity_blocks=0)  # no request is there to have one
    with ExitStack() as opened:
        if number is not None:
            shared = isinstance(runner, CopiesInRanks) and config.worker.tensor_parallel > 1
            attachment = PoolAttachment(Path(config.worker.kvbm.pool), config.instance, number, shared=shared)
            if isinstance(runner, CopiesInRanks):
                runner.pool_place = attachment.place
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            mover = runner.mover(time.monotonic)
            if mover.fileno() >= 0:
                channel.watch(mover.fileno())
            share_reader, sharer = _sharing(config, runner, channel)
            kvbm = opened.enter_context(closing(SocketClient(Path(config.worker.kvbm.pool))))
            channel.watch(kvbm.fileno())
            layout = embeddings_layout(config, runner.facts)
            if layout is not None and isinstance(runner, EncodesImages):
                facts = msgspec.structs.replace(facts, embeddings_layout=layout.digest)
                embeddings = _share_embeddings(config, runner, layout)
                opened.enter_context(closing(embeddings))
                channel.watch(embeddings.fileno())
        if not config.stands_by:
            _compute_first_tokens(config.worker, channel, runner)
        engine = EngineCore.of(
            *(config, runner.facts, mover, attachment),
            share_reader=share_reader,
            sharer=sharer,
            encoder_cache=runner.encoder_cache if isinstance(runner, EncodesImages) else None,
            looks_up=embeddings is not None,
        )
        with closing(engine) as core:
            channel.send(msgspec.structs.replace(facts, shares_blocks=sharer is not None))
            EngineLoop(channel, core, runner, time.monotonic, kvbm, embeddings).run()


def embeddings_layout(config: EngineConfig, facts: Ready) -> StoreLayout | None:
    """Return what must be the same in two engines that exchange embeddings of images. None if this one exchanges none.

    The host has all of them in float32, but they differ by the type that the vision tower computes with."""
    worker = config.worker
    if not worker.kvbm.embeddings or facts.images is None:
        return None
    image_bytes = 4 * facts.images.tokens * facts.embedding_size
    form = f"embeddings of images, computed in {worker.cuda.dtype if worker.device == 'cuda' else 'float32'}"
    shape = KvLayout("float32", 1, 1, 1, 1, form=form, form_bytes=image_bytes)
    return StoreLayout(model=config.model_name, weights=facts.weights, kv=shape)


def _share_embeddings(config: EngineConfig, runner: EncodesImages, layout: StoreLayout) -> EmbeddingLookups:
    """Have a runner keep embeddings in the kvbm. Return the store."""
    pool = Path(config.worker.kvbm.pool)
    owed = max(1, OWED_LIMIT // THREADS)
    lookups = ThreadedLookups(lambda: KvbmEmbeddings(pool, config.instance, layout, owed_limit=owed))
    runner.use_lookups(lookups)
    return lookups


def _sharing(
    config: EngineConfig, runner: Runner, channel: EngineEnd
) -> tuple[BlockReader | None, Callable[[SharableBlocks], BlockSharer] | None]:
    """Return what reads blocks of other engines of the machine, and what shares blocks with them; None for what
    this engine does not do."""
    settings = config.worker
    if not isinstance(runner, HasSharableMemory) or not (settings.shares_blocks or settings.reads_shared):
        return None, None
    memory = runner.sharable_memory
    if settings.shares_blocks and memory().pages is None:
        return None, None
    facts, directory = runner.facts, Path(settings.kvbm.pool)
    layout = store_layout(config, facts).digest
    identity = SharingIdentity(config.model_name, layout, facts.kv_layout.dtype, kind=memory().kind)
    if settings.reads_shared:
        share_reader = BlockReader(directory, memory, identity, time.monotonic)
        channel.watch(share_reader.fileno())
        return share_reader, None

    def sharer(blocks: SharableBlocks) -> BlockSharer:
        limits = SharingLimits(blocks=max(1, facts.capacity_blocks // SHARED_PART))
        block_sharer = BlockSharer(directory, memory, identity, blocks, limits)
        channel.watch(block_sharer.fileno())
        return block_sharer

    return None, sharer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
