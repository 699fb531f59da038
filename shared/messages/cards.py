"""What processes publish in discovery, as JSON under a lease: their address book entries, and model cards. Pure."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from shared.messages.codec import Codec

PROTOCOL = 1
ServiceName = Literal["frontend", "router", "worker", "kvbm", "turns"]
Role = Literal["aggregated", "prefill", "decode", "encode"]
ASLEEP = "asleep"
"""The state of a worker that sleeps (`Instance.state`)."""
EVENTS_ON_NATS, EVENTS_IN_STREAM = "nats:", "jetstream:"
"""What precedes the subject of a source, and the name of the stream that keeps its batches, in an EventSource."""
Pooling = Literal["", "mean", "last"]
"""How an embedding is made: from the mean of all positions' hidden states, or from the last one. Empty if it makes
none."""


class EventSource(Struct, frozen=True):
    """The address of a stream of KV events, and what its source can do beyond vLLM's format."""

    publish: str
    """The ZMQ endpoint of the PUB socket; or `nats:` and a subject."""
    replay: str
    """The ZMQ endpoint of the ROUTER socket that replays batches, bound by the source; `nats:` and the subject on which
    the source answers; or `jetstream:` and the stream that keeps its batches. Empty if there is no replay."""
    topic: str = ""
    binds: Literal["source", "subscriber"] = "source"
    """Which side binds `publish`."""
    epoch: bool = False
    """Whether the load reports of the source name the epoch of its events."""
    snapshot: bool = False
    """Whether the source answers a SnapshotRequest."""
    digest: bool = False
    """Whether the load reports of the source have a digest of its blocks."""
    curve_key: str = ""
    """The public CURVE key of the source, in Z85. Empty if it is not encrypted."""

    @property
    def stored(self) -> bool:
        """Whether a stream keeps the batches, so that a replay needs no source."""
        return self.replay.startswith(EVENTS_IN_STREAM)


class TurnTaker(Struct, frozen=True):
    """What a worker says of itself while its model takes turns with others on a device, awake or asleep."""

    device: str
    """The name of the device: of those models of which only a few are awake at once."""
    card: ModelCard
    """The card of the model as it is when it is awake: frontends know the model by it while it sleeps."""


class Instance(Struct, frozen=True):
    """The address book entry of one running process."""

    namespace: str
    service: ServiceName
    instance: str
    epoch: int
    """The number of leases that this process has held: 1 at first, one more each time a lease is lost."""
    machine: str
    pid: int
    started: float
    """When the process started, in seconds since 1970. It orders the model cards of workers."""
    version: str
    protocol: int = PROTOCOL
    subjects: dict[str, str] = {}
    """The subject of each operation; every service has `control`."""
    events: EventSource | None = None
    http: str = ""
    """The base URL of /live, /health and /metrics of the process. Empty if there is none."""
    api: str = ""
    """The base URL at which clients reach this frontend; other processes may share it."""
    layouts: dict[str, EventSource] = {}
    """The source of KV events of each layout of a kvbm, by the layout's digest."""
    pid_namespace: int = 0
    """The kernel's number of the PID namespace of `pid` (the inode of /proc/self/ns/pid). 0 if unknown."""
    state: str = ""
    """Why a worker takes no requests although it lives: draining, drained, asleep or waking. Empty if nothing asked
    for that."""
    peers: str = ""
    """HOST:PORT at which kvbms of other machines can read this kvbm's blocks. Empty if they cannot."""
    role: Role = "aggregated"
    """The role of a worker, which its card has too, for as long as it has one."""
    turns: TurnTaker | None = None
    """The turn of a worker's model. None if the worker takes requests all the time."""
    model: str = ""
    """The name of a worker's model, also while it has no card, as when it sleeps. Empty before its first card."""
    device: str = ""
    """The device of a worker's engine, as its card has it, also while it has none. Empty as there, or before the first
    one."""


class KvLayout(Struct, frozen=True, omit_defaults=True):
    """The shape of one block's KV in memory. Blocks of different layouts are never exchanged."""

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    """The number of tokens in a block."""
    form: str = ""
    """A digest of the order of the bytes in a block of another engine. Empty means the native engine's order."""
    form_bytes: Annotated[int, Meta(ge=0)] = 0
    """The size of one block of that engine in bytes. 0 if the size follows from the other fields."""

    @property
    def block_bytes(self) -> int:
        """The size of one block in bytes: keys and values of all layers."""
        if self.form_bytes:
            return self.form_bytes
        item = {"float32": 4, "float16": 2, "bfloat16": 2}[self.dtype]
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_size * item

    @property
    def digest(self) -> str:
        """The name of the layout: 16 hex digits."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class SamplingDefaults(Struct, frozen=True):
    """The sampling parameters of requests that do not set them, as in `Sampling`."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0


class ImageInput(Struct, frozen=True):
    """How a model's processor prepares an image: resized by `filter` so that its shorter side is `resize` pixels (0: to
    width and height, whatever its shape), cut from its centre to width and height (black where it is smaller). With a
    `unit` it is resized alone, to a size that its own one decides (`shared.image_size`)."""

    token_id: int
    """The token that stands for each of an image's embeddings in the prompt."""
    tokens: int
    """How many of them an image takes. 0 if it depends on the image, as then do `width`, `height` and `resize`."""
    width: int
    height: int
    resize: int
    filter: str
    """Pillow's name of a resampling filter, such as BICUBIC."""
    unit: int = 0
    """The sides of a prepared image are multiples of this many pixels, and each square of them is a token. 0 if all
    images have one size."""
    least_pixels: int = 0
    """The least pixels of a prepared image with a unit."""
    most_pixels: int = 0
    """The most pixels of one, unless it is narrower than a unit."""
    template_text: str = ""
    """What a chat template writes in place of an image. Empty if it writes the text of the token."""
    prompt_text: str = ""
    """What that becomes before it is tokenised: a text in which that of the token stands once."""


class PictureEdit(Struct, frozen=True):
    """How a model makes pictures or videos from images."""

    images: int = 1
    """Most images that one is made from."""
    strength: float = 0.0
    """How much of an image is changed by a request that does not say it, up to 1 for all. 0 if the model takes none."""
    guidance: bool = True
    """Whether the model takes a guidance with images."""
    negative: bool = True
    """Whether the model takes a negative prompt with images."""


class PictureOutput(Struct, frozen=True):
    """What a model makes that makes pictures or videos, and what a request may ask for."""

    pipeline: str
    """The name of its pipeline, such as StableDiffusionXLPipeline."""
    width: int
    """The pixels of a picture whose request names no size, as `height`."""
    height: int
    multiple: int
    """Width and height are multiples of it."""
    most_pixels: int
    """The most pixels of a picture, or of one frame."""
    steps: int
    """The denoising steps of a request that names none."""
    most_steps: int
    frames: int = 0
    """The frames of a video whose request names no length. 0 if the model makes pictures."""
    most_frames: int = 0
    """The most frames of a video."""
    frame_multiple: int = 1
    """A video has one frame more than a multiple of it."""
    guidance: bool = True
    """Whether the model takes a guidance."""
    negative: bool = True
    """Whether the model takes a negative prompt."""
    texts: bool = True
    """Whether the model makes pictures from a text alone."""
    edit: PictureEdit | None = None
    """How it makes pictures from images. None if it does not."""
    masked_edit: PictureEdit | None = None
    """How it makes pictures from an image and a mask. None if it does not."""

    def edit_of(self, *, masked: bool) -> PictureEdit | None:
        """Return how a picture is made from images. None if it cannot be made."""
        return self.masked_edit if masked else self.edit

    @property
    def kind(self) -> str:
        """What it makes, in a word."""
        return "videos" if self.frames else "pictures"


class ModelCard(Struct, frozen=True):
    """One model as one instance serves it."""

    model: str
    instance: str
    path: str
    """The directory with tokenizer.json and tokenizer_config.json, as the worker sees it."""
    tokenizer_digest: str
    """The SHA-256 of tokenizer.json, in hex."""
    hash_self_test: str
    """The result of `shared.hashing.self_test(block_size)` in this instance."""
    context_length: int
    vocab_size: int
    block_size: int
    capacity_blocks: int
    """The number of blocks that each rank has."""
    kv_layout: KvLayout
    eos_token_ids: tuple[int, ...] = ()
    role: Role = "aggregated"
    """What the instance does of a request: all of it; prefill: only prompts, which it hands over with their first
    token; decode: it takes such requests over, and computes a prompt itself where no worker hands it over; encode:
    nothing of it, since it only encodes images for the other workers of its kvbm."""
    ranks: int = 1
    """The number of data-parallel ranks; a candidate is (instance, rank)."""
    max_running: int = 0
    """How many requests each rank computes at once. 0 if it is not known."""
    lora: tuple[str, ...] = ()
    """The ids (`shared.lora`) of the LoRAs that are loaded; each one's name is also that of a model for clients."""
    kvbm: str = ""
    """The instance id of the kvbm that this worker is attached to. Empty if there is none."""
    kvbm_layout: str = ""
    """The digest of the worker's layout at that kvbm."""
    grammars: bool = False
    """Whether the instance applies `Sampling.grammar`; an instance without this flag ignores the field."""
    biases: bool = False
    """Whether the instance applies `Sampling.logit_bias`; an instance without this flag ignores the field."""
    min_tokens: bool = False
    """Whether the instance applies `Sampling.min_tokens`; an instance without this flag ignores the field."""
    prompt_logprobs: bool = False
    """Whether the instance applies `Sampling.prompt_logprobs`; an instance without this flag ignores the field."""
    allowed_tokens: bool = False
    """Whether the instance applies `Sampling.allowed_tokens`; an instance without this flag ignores the field."""
    forgets_output: bool = False
    """Whether an attempt that the instance continues counts only its own tokens: presence and frequency penalties begin
    again, and no grammar can be continued."""
    embedding_size: int = 0
    """The length of an embedding in floats. 0 if the instance ignores `Sampling.pooling`, and answers with text."""
    pooling: Pooling = ""
    """The pooling that the model was trained with. Empty if it is one that is not implemented."""
    generates: bool = True
    """Whether the instance answers with text. If false, it only makes embeddings."""
    device: str = ""
    """The device of the engine, for people: cpu, or cuda:N, where N is that process's number of the GPU. Empty if
    there is none."""
    sampling: SamplingDefaults = SamplingDefaults()
    """What the model's generation_config.json, or the worker's settings, recommend."""
    chat_template: str = ""
    """The chat template that replaces that of `path`: a name of `shared.chat_templates`, or a file's absolute path as
    the worker sees it. Empty if none does."""
    template_digest: str = ""
    """The SHA-256, in hex, of the file with the chat template. Empty if there is none, or an older worker wrote
    this."""
    images: ImageInput | None = None
    """How images are prepared for the instance, which applies `Generate.images`. None if it takes none."""
    embeddings_layout: str = ""
    """The digest of all but sizes that two instances must have in common for embeddings of images that one stores in
    its kvbm to be found by the other one. Empty if the instance exchanges none."""
    template_text: str = ""
    """The text of the template that `chat_template` names, so that each frontend renders the same. Empty if there is
    none, it is too long for a card, or an older worker wrote this. Then frontends read the file, and compare its
    digest."""
    address: str = ""
    """IP:PORT of the server that an attached instance stands for, as a gateway reaches it. Empty if there is none, or
    an older worker wrote this."""
    server: str = ""
    """The URL of that server, if it takes and gives text alone. Frontends then send requests to it themselves, at
    `address`, and none to the instance. Empty if the instance takes token ids."""
    alias: str = ""
    """The model's name at that server, if it is not `model`. It means the model for clients too, unless another model
    has it. Empty if there is none, or an older worker wrote this."""
    pictures: PictureOutput | None = None
    """What the instance makes of `Generate.picture`. None if it makes text or embeddings; otherwise it makes neither,
    and there is no tokenizer."""

    @property
    def decodes(self) -> bool:
        """Whether the instance can answer a whole request. A model is ready only with such an instance."""
        return self.role in ("aggregated", "decode")

    @property
    def routed(self) -> bool:
        """Whether routers choose the instance."""
        return self.decodes or self.role == "prefill"


INSTANCE: Codec[Instance] = Codec(Instance, "instance")
MODEL_CARD: Codec[ModelCard] = Codec(ModelCard, "model card")
