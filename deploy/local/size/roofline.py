"""A roofline of a model on GPUs: memory for KV, time to the first token, time a token. Pure.

    step  = (layer + sequence x batch) x layers + each x matrices
            + max(weights ÷ memory rate, arithmetic ÷ arithmetic rate) + values that small kernels move ÷ memory rate
            + KV of all sequences ÷ memory rate + two all-reduces a layer, if several GPUs share it
    prompt = arithmetic ÷ arithmetic rate + pairs of tokens ÷ attention's rate + moved values + all-reduces
    first = fixed + prompt, but at least the weights ÷ memory rate

Rates are the published ones times the `Achieved` fractions. Those of matrices, attention and all-reduces follow from
the times of single operations that NVIDIA measured on an H200 and an H100 (`TABLES`); the other figures from one model
on one GPU.

In a steady load each sequence of a batch also waits for the prompts of others: while one answer has `output` tokens,
`batch` new prompts are computed, so that a token takes `step + batch ÷ output x prompt`.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from deploy.local.size.shape import ModelShape
from shared.errors import ConfigError

GB = 1e9
_TABLE_BITS = 16.0
"""Bits of the parameters of embedding and head, which quantised models leave as they are."""
NATIVE_RANKS = 8
"""The most GPUs of a worker with the native engine."""
_STATE_BYTES = 4
"""Bytes of a value that a layer of linear attention keeps of a sequence: they are added to at each token."""
_LAYER_MATRICES = 4
"""The multiplications of a layer: queries with keys and values, output, gate with up, down."""


class GpuFacts(Struct, frozen=True):
    """The published figures of a GPU."""

    name: str
    full_name: str
    memory_gb: float
    bandwidth_gb_s: float
    tflops_16: float
    tflops_8: float
    link_gb_s: float
    """The rate between two GPUs, in one direction."""
    watts: float
    """The power limit in the datasheet."""
    source: str


class Achieved(Struct, frozen=True):
    """What an engine reaches of the published figures, and what it takes in addition."""

    memory: tuple[float, float]
    """The part of the memory's rate at which matrices are read in decode steps: of 16 bits, of fewer."""
    each_s: tuple[float, float]
    """The time that each matrix takes in addition to the reading: the start of its kernels, and their last wave."""
    kv: float
    """The part of the memory's rate at which KV is read."""
    arithmetic: tuple[float, float]
    """The part of the arithmetic rate in prompts and large batches: of 16 bits, of 8."""
    attention: float
    """The part of the rate of 16 bits at which prompts' attention is computed."""
    moved: float
    """The part of the memory's rate at which norms, rotations and activations read and write their values."""
    layer_s: float
    """The time that each layer adds to a step after its matrices: the start of attention, and of small kernels."""
    sequence_s: float
    """The time that each sequence adds to each layer, without its KV and values."""
    first_s: float
    """The fixed time of a prompt."""
    source: str
    whole_embedding: bool = False
    """True if each GPU of a tensor-parallel group has the whole embedding."""


TABLES = "the measured tables of NVIDIA's aiconfigurator-core 0.12, vLLM 0.24 on H200 and H100"
ENGINES: dict[str, Achieved] = {
    "vllm": Achieved(
        memory=(0.84, 0.78),
        each_s=(4e-6, 7e-6),
        kv=0.86,
        arithmetic=(0.80, 0.58),
        attention=0.55,
        moved=0.55,
        layer_s=17e-6,
        sequence_s=0.05e-6,
        first_s=10e-3,
        source=f"{TABLES}; vLLM 0.32 on one H200, an 8B Llama shape: benchmarks/results/vllm_gpu_engines.json",
    ),
    "native": Achieved(
        memory=(0.84, 0.84),
        each_s=(4e-6, 4e-6),
        kv=0.86,
        arithmetic=(0.76, 0.76),
        attention=0.24,
        moved=0.55,
        layer_s=4e-6,
        sequence_s=0.35e-6,
        first_s=4e-3,
        source="the native engine on one H200, an 8B Llama shape in bfloat16: benchmarks/results/vllm_gpu_engines.json",
        whole_embedding=True,
    ),
}
"""The fractions by engine. Over the tables' multiplications of 1 to 8,192 rows by matrices of 16 M to 400 M parameters
those of vLLM are off by 5 % (16 bits) and 11 % (8 bits) in the median; over attentions of 128 to 32,768 tokens by 6 and
9 %; the attention of prompts from 4,096 tokens on reaches 0.54 to 0.61, of 2,048 0.46."""
EIGHT_BIT_KV = 2.8e-3
"""The bytes of KV of 8 bits that attention reads while the GPU could do one operation of 16 bits: converting it is what
takes the time. An H200, with 1.4 times the memory's rate, reads 0.3 GB and more of it at 2.93 TB/s, an H100 at 2.65
(`TABLES`)."""
REDUCE_S = 4.6e-6
"""The time of a small all-reduce: vLLM's own in a CUDA graph, 4.4 µs between two GPUs, 4.8 among eight (`TABLES`)."""
LINK = 0.35
"""The part of the link's rate that all-reduces of 1 MiB and more reach: 0.29 to 0.33 between two GPUs, up to 0.46 among
eight, by vLLM and by NCCL alike (`TABLES`)."""
_HIDDEN_MOVED = 10
"""How often a layer's small kernels read or write a token's hidden vector: two norms with the sum before them 4 times
each, the rotation of queries and keys twice."""


class GpuSplit(Struct, frozen=True):
    """How a model is shared out among GPUs."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline


class StepParts(Struct, frozen=True):
    """The parts of one decode step, in seconds."""

    weights_s: float
    arithmetic_s: float
    kv_s: float
    links_s: float
    rest_s: float

    @property
    def seconds(self) -> float:
        return max(self.weights_s, self.arithmetic_s) + self.kv_s + self.links_s + self.rest_s

    @property
    def binds(self) -> str:
        """What takes most of the step."""
        parts = {
            "weights": self.weights_s if self.weights_s >= self.arithmetic_s else 0.0,
            "arithmetic": self.arithmetic_s if self.arithmetic_s > self.weights_s else 0.0,
            "KV": self.kv_s,
            "links": self.links_s,
            "engine": self.rest_s,
        }
        return max(parts, key=lambda name: parts[name])


class Roofline(Struct, frozen=True):
    """One model on one split of one kind of GPU."""

    shape: ModelShape
    gpu: GpuFacts
    split: GpuSplit
    achieved: Achieved
    weight_bits: float
    kv_bits: float

    # --- memory

    @property
    def gpu_weights_bytes(self) -> float:
        """The weights on the GPU that has most of them."""
        layers = -(-self.shape.layers // self.split.pipeline) / self.shape.layers
        tables = 1 if self.shape.tied or self.split.pipeline > 1 else 2
        decoder_bytes = self.shape.decoder_weights * layers * self.weight_bits / 8
        table_bytes = self.shape.table_weights * _TABLE_BITS / 8
        if self.achieved.whole_embedding and self.split.tensor > 1:
            return table_bytes + (decoder_bytes + table_bytes) / self.split.tensor
        return (decoder_bytes + tables * table_bytes) / self.split.tensor

    @property
    def gpu_kv_token_bytes(self) -> float:
        """The KV of one token on the GPU that has most of it."""
        layers = -(-self.shape.kv_layers // self.split.pipeline)
        return layers * self._layer_kv_bytes

    @property
    def _gpu_state_bytes(self) -> float:
        """What layers of linear attention keep of one sequence on each GPU."""
        return self.shape.state_values * _STATE_BYTES / self.split.gpus

    @property
    def _layer_kv_bytes(self) -> float:
        shared_by = 1 if self.shape.latent else min(self.split.tensor, self.shape.kv_heads)
        return self.shape.kv_values / shared_by * self.kv_bits / 8

    def kv_tokens(self, memory_share: float, sequence_tokens: int) -> int:
        """Return for how many tokens there is room if each sequence has `sequence_tokens`. Raise ConfigError if the
        weights leave none."""
        room = self._room_bytes(memory_share)
        if room < self.gpu_kv_token_bytes:
            raise ConfigError(
                f"the weights take {self.gpu_weights_bytes / GB:.1f} GB of each {self.gpu.name}, "
                f"{-room / GB:.1f} GB more than {memory_share:g} of its {self.gpu.memory_gb:g} GB: "
                f"{self._more_gpus(memory_share)}, or fewer bits for a weight"
            )
        return int(room / (self.gpu_kv_token_bytes + self._gpu_state_bytes / sequence_tokens))

    def _room_bytes(self, memory_share: float) -> float:
        """Return what weights leave of the share of a GPU's memory."""
        return self.gpu.memory_gb * GB * memory_share - self.gpu_weights_bytes

    def _more_gpus(self, memory_share: float) -> str:
        """Return which split among more GPUs leaves room for KV."""
        for tensor in range(self.split.tensor + 1, NATIVE_RANKS + 1):
            wider = replace(self, split=replace(self.split, tensor=tensor))
            room = wider._room_bytes(memory_share)
            if room > wider.gpu_kv_token_bytes and _splits(self.shape, wider.split):
                return f"--tensor-parallel {tensor} leaves {room / GB:.0f} GB on each"
        return "use more GPUs"

    # --- time

    def decode(self, batch: float, context: float) -> StepParts:
        """Return a token's way through all stages, with `batch` sequences of `context` tokens in flight."""
        shape, split, done = self.shape, self.split, self.achieved
        at_once = max(1.0, batch / split.pipeline)
        rate, few = self.gpu.bandwidth_gb_s * GB, self.weight_bits < 16
        decoder_s = shape.touched_weights(at_once) * self.weight_bits / 8 / split.tensor / rate / done.memory[few]
        head_s = shape.table_weights * _TABLE_BITS / 8 / split.tensor / rate / done.memory[0]
        each_s = _LAYER_MATRICES * shape.layers * done.each_s[few] + done.each_s[0]
        kv = at_once * context * shape.kv_layers * self._layer_kv_bytes
        state_s = 2 * at_once * shape.state_values * _STATE_BYTES / split.tensor / rate  # it is read and written
        kv_rate = rate * done.kv
        if self.kv_bits < 16:
            kv_rate = min(kv_rate, self.gpu.tflops_16 * 1e12 * EIGHT_BIT_KV)
        return StepParts(
            weights_s=decoder_s + head_s + each_s,
            arithmetic_s=self._matmuls_s(at_once, at_once) + each_s,
            kv_s=kv / kv_rate + state_s,
            links_s=self._links_s(at_once),
            rest_s=(done.layer_s + done.sequence_s * at_once) * shape.layers + self._moved_s(at_once),
        )

    def first_s(self, prompt: float, cached: float = 0.0) -> float:
        """Return the time to the first token of a lone prompt of which a share is cached."""
        read_s = self.decode(1, prompt * cached).weights_s
        return self.achieved.first_s + max(read_s, self._prompt_s(prompt, cached))

    def loaded_s(self, batch: int, prompt: float, output: float, cached: float = 0.0) -> float:
        """Return the time a token of a steady load of `batch` sequences, as the module explains."""
        return self.decode(batch, prompt + output / 2).seconds + batch / output * self._prompt_s(prompt, cached)

    def _prompt_s(self, prompt: float, cached: float) -> float:
        """Return the time that a prompt takes among others: its arithmetic, moved values and all-reduces."""
        before, new = prompt * cached, max(1.0, prompt * (1 - cached))
        pairs = new * before + new * new / 2
        rate = self.split.tensor * self.gpu.tflops_16 * 1e12 * self.achieved.attention
        attention_s = self.shape.attention_flops * pairs / rate
        return self._matmuls_s(new, 1) + attention_s + self._moved_s(new) + self._links_s(new)

    def _moved_s(self, tokens: float) -> float:
        """Return the time in which small kernels read and write the values of tokens, in 16 bits."""
        shape, rate = self.shape, self.gpu.bandwidth_gb_s * GB * self.achieved.moved
        values = shape.layers * _HIDDEN_MOVED * shape.hidden + shape.mlp_values / self.split.tensor
        return tokens * 2 * values / rate

    def _matmuls_s(self, tokens: float, drawn: float) -> float:
        """Return the arithmetic of tokens, for `drawn` of which the head is computed."""
        eight = self.weight_bits == 8
        rates = [each * 1e12 for each in (self.gpu.tflops_16, self.gpu.tflops_8)]
        table_s = 2 * self.shape.table_weights * drawn / rates[0] / self.achieved.arithmetic[0]
        seconds = 2 * self.shape.active_weights * tokens / rates[eight] / self.achieved.arithmetic[eight] + table_s
        return seconds / self.split.tensor

    def _links_s(self, tokens: float) -> float:
        """Return the time of all-reduces within stages, and of copies between them."""
        tensor, pipeline = self.split.tensor, self.split.pipeline
        moved_s = tokens * self.shape.hidden * 2 / (self.gpu.link_gb_s * GB * LINK)
        within_s = 2 * self.shape.layers * (REDUCE_S + 2 * (tensor - 1) / tensor * moved_s) if tensor > 1 else 0.0
        return within_s + (pipeline - 1) * (REDUCE_S + moved_s)


def _splits(shape: ModelShape, split: GpuSplit) -> bool:
    try:
        check_split(shape, split, "")
    except ConfigError:
        return False
    return True


def check_split(shape: ModelShape, split: GpuSplit, engine: str) -> None:
    """Raise ConfigError if the model cannot be shared out so."""
    if engine == "native" and (split.pipeline > 1 or split.tensor > NATIVE_RANKS):
        raise ConfigError(
            f"the native engine shares a model among up to {NATIVE_RANKS} GPUs by --tensor-parallel alone: use --engine"
            " vllm"
        )
    if engine == "native" and shape.experts:
        raise ConfigError("the native engine has no mixtures of experts: use --engine vllm")
    for name, size in (("heads", shape.heads), ("values between the MLP's matrices", shape.intermediate)):
        if size % split.tensor:
            raise ConfigError(f"--tensor-parallel {split.tensor} does not divide the model's {size} {name}")
    few, many = sorted((shape.kv_heads, split.tensor))
    if not shape.latent and many % few:
        raise ConfigError(f"--tensor-parallel {split.tensor} does not fit the model's {shape.kv_heads} KV heads")
    if split.pipeline > shape.layers:
        raise ConfigError(f"--pipeline-parallel {split.pipeline} is more than the model's {shape.layers} layers")
    if split.expert > 1 and not shape.experts:
        raise ConfigError(f"--expert-parallel {split.expert}: the model has no experts")
    if split.expert not in (1, split.tensor):
        raise ConfigError(f"--expert-parallel {split.expert} is neither 1 nor --tensor-parallel {split.tensor}")
    if split.expert > 1 and shape.experts % split.expert:
        raise ConfigError(f"--expert-parallel {split.expert} does not divide the model's {shape.experts} experts")
