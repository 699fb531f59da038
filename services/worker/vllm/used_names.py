"""The names of vLLM that the engine and the connector use: the one place where they are listed.

`services.worker.vllm.interface` compares them with the sources of a vLLM. A name that is imported from vLLM must be
here (tests/worker/vllm/test_used_names.py), and so must what is read of vLLM's objects, which no test can find.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import fields

from services.worker.vllm.settings import COMPILING, IN_CORE, NEEDED, OURS, SPREADING
from shared.messages.kv_events import BlockRemoved, BlockStored

Parameters = tuple[str, ...]
"""Names of parameters that we pass. Those before a "/" are passed by position, so their places count too."""


class Used(Struct, frozen=True):
    """What is used of a class or of a function."""

    passes: Parameters = ()
    """Parameters of the function, or of the class's constructor."""
    reads: tuple[str, ...] = ()
    """Attributes of the class or of its objects."""
    calls: Mapping[str, Parameters] = {}
    """Method → the parameters that we pass to it."""
    overrides: Mapping[str, tuple[str, ...]] = {}
    """Method that we define ourselves → all of its parameters, without self and keywords."""


Table = Mapping[str, Used]
"""Name with its module, such as `vllm.lora.request:LoRARequest` → what is used of it."""

CONNECTOR_METHODS: Mapping[str, tuple[str, ...]] = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "bind_kv_cache_manager": ("kv_cache_manager",),
    "build_connector_meta": ("scheduler_output",),
    "build_connector_worker_meta": (),
    "get_block_ids_with_load_errors": (),
    "get_external_cache_hit_sources": ("request", "num_external_tokens"),
    "get_finished": ("finished_req_ids",),
    "get_kv_connector_stats": (),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "has_pending_push_work": (),
    "on_new_request": ("request",),
    "register_kv_caches": ("kv_caches",),
    "request_finished": ("request", "block_ids"),
    "reset_cache": (),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
    "shutdown": (),
    "start_load_kv": ("forward_context",),
    "update_connector_output": ("connector_output",),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "wait_for_layer_load": ("layer_name",),
    "wait_for_save": (),
}
"""Method of vLLM's KVConnectorBase_V1 → its parameters, without self and keywords."""

ENVIRONMENT = (
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_HOST_IP",
    "VLLM_RPC_BASE_PATH",
    "VLLM_NO_USAGE_STATS",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CPU_KVCACHE_SPACE",
)
"""Environment variables of vLLM that a worker sets."""

ENGINE: Table = {
    "vllm:__version__": Used(),
    "vllm.envs:environment_variables": Used(reads=ENVIRONMENT),
    "vllm.platforms:current_platform": Used(),
    "vllm.platforms.interface:Platform": Used(
        reads=("device_type",),
        calls={"is_cpu": (), "is_unspecified": (), "is_cuda": (), "get_device_uuid": ("device_id", "/")},
    ),
    "vllm.config:KVEventsConfig": Used(
        passes=("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "hwm")
    ),
    "vllm.config:KVTransferConfig": Used(
        passes=(
            "kv_connector",
            "kv_connector_module_path",
            "kv_role",
            "kv_load_failure_policy",
            "kv_connector_extra_config",
        )
    ),
    "vllm.config:ECTransferConfig": Used(
        passes=("ec_connector", "ec_connector_module_path", "ec_role", "ec_connector_extra_config"),
        reads=("ec_role", "ec_connector_extra_config", "is_encode_only"),
    ),
    "vllm.config:PoolerConfig": Used(passes=("pooling_type",), reads=("seq_pooling_type",)),
    "vllm.config:StructuredOutputsConfig": Used(reads=("backend",)),
    "vllm.config:VllmConfig": Used(
        reads=(
            "model_config",
            "cache_config",
            "parallel_config",
            "scheduler_config",
            "lora_config",
            "ec_transfer_config",
            "load_config",
        )
    ),
    "vllm.config.model:ModelConfig": Used(
        reads=(
            "runner_type",
            "pooler_config",
            "dtype",
            "enable_sleep_mode",
            "max_model_len",
            "model",
            "hf_text_config",
            "tokenizer",
            "is_multimodal_model",
            "architecture",
            "quantization",
            "revision",
            "hf_config",
        ),
        calls={
            "get_vocab_size": (),
            "get_total_num_hidden_layers": (),
            "get_total_num_kv_heads": (),
            "get_head_size": (),
            "get_hidden_size": (),
            "try_get_generation_config": (),
            "get_multimodal_config": (),
        },
    ),
    "vllm.config.multimodal:MultiModalConfig": Used(
        reads=("mm_device_do_normalize", "mm_processor_kwargs"), calls={"get_limit_per_prompt": ("modality", "/")}
    ),
    "vllm.config.cache:CacheConfig": Used(reads=("block_size", "num_gpu_blocks", "cache_dtype")),
    "vllm.config.parallel:ParallelConfig": Used(reads=("data_parallel_size", "world_size")),
    "vllm.config.scheduler:SchedulerConfig": Used(
        reads=("policy", "async_scheduling", "enable_chunked_prefill", "disable_chunked_mm_input")
    ),
    "vllm.config.lora:LoRAConfig": Used(reads=("max_cpu_loras",)),
    "vllm.engine.arg_utils:AsyncEngineArgs": Used(
        passes=(
            *OURS,
            *NEEDED,
            *sorted(COMPILING),
            "dtype",
            "quantization",
            *SPREADING,
            "distributed_executor_backend",
            "otlp_traces_endpoint",
            "scheduler_cls",
            "max_num_seqs",
            "block_size",
            "num_gpu_blocks_override",
            "kv_transfer_config",
            "ec_transfer_config",
            "structured_outputs_config",
            "enable_lora",
            "max_loras",
            "max_cpu_loras",
        ),
        reads=("runner", "pooler_config", "data_parallel_size"),
        calls={"add_cli_args": ("parser", "/"), "create_engine_config": ()},
    ),
    ":".join(IN_CORE.rsplit(".", 1)): Used(),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": Used(passes=("vllm_config",)),
    "vllm.v1.core.sched.scheduler:Scheduler": Used(
        passes=("vllm_config",),
        reads=("block_size", "max_num_scheduled_tokens", "num_spec_tokens", "running"),
        calls={"schedule": (), "update_from_output": ("scheduler_output", "/")},
    ),
    "vllm.utils.argparse_utils:FlexibleArgumentParser": Used(),
    "vllm.v1.engine.async_llm:AsyncLLM": Used(
        reads=("vllm_config", "errored", "dead_error"),
        calls={
            "from_vllm_config": ("vllm_config", "/", "stat_loggers"),
            "add_request": (
                "request_id",
                "prompt",
                "params",
                "/",
                "lora_request",
                "trace_headers",
                "priority",
                "data_parallel_rank",
            ),
            "abort": ("request_id", "/"),
            "sleep": ("level", "/"),
            "wake_up": (),
            "collective_rpc": ("method", "/"),
            "reset_prefix_cache": ("reset_running_requests",),
            "add_lora": ("lora_request", "/"),
            "remove_lora": ("lora_id", "/"),
            "shutdown": (),
        },
    ),
    "vllm.v1.engine.output_processor:RequestOutputCollector": Used(
        calls={"get": (), "get_nowait": ()}, overrides={"put": ("output",)}
    ),
    "vllm.v1.engine.exceptions:EngineDeadError": Used(),
    "vllm.exceptions:GenerationError": Used(),
    "vllm.exceptions:VLLMClientError": Used(),
    "vllm.exceptions:VLLMValidationError": Used(),
    "vllm.inputs:TokensInput": Used(),
    "vllm.inputs:MultiModalInput": Used(),
    "vllm.inputs.engine:mm_input": Used(
        passes=("prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders", "/", "cache_salt")
    ),
    "vllm.multimodal.inputs:MultiModalBatchedField": Used(passes=("keep_on_cpu",)),
    "vllm.multimodal.inputs:MultiModalFlatField": Used(passes=("slices",)),
    "vllm.multimodal.inputs:MultiModalFieldElem": Used(passes=("data", "field")),
    "vllm.multimodal.inputs:MultiModalKwargsItem": Used(),
    "vllm.multimodal.inputs:MultiModalKwargsItems": Used(),
    "vllm.multimodal.inputs:PlaceholderRange": Used(passes=("offset", "length"), reads=("offset", "length")),
    "vllm.inputs:tokens_input": Used(passes=("prompt_token_ids", "/", "cache_salt")),
    "vllm.outputs:RequestOutput": Used(
        reads=("outputs", "prompt_logprobs", "prompt_token_ids", "num_cached_tokens", "metrics", "finished")
    ),
    "vllm.outputs:CompletionOutput": Used(reads=("token_ids", "finish_reason", "logprobs")),
    "vllm.outputs:PoolingRequestOutput": Used(reads=("finished", "outputs")),
    "vllm.outputs:PoolingOutput": Used(reads=("data",)),
    "vllm.logprobs:Logprob": Used(reads=("logprob", "rank")),
    "vllm.sampling_params:RequestOutputKind": Used(reads=("DELTA", "FINAL_ONLY")),
    "vllm.sampling_params:SamplingParams": Used(
        passes=(
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logprobs",
            "prompt_logprobs",
            "stop_token_ids",
            "ignore_eos",
            "structured_outputs",
            "logit_bias",
            "allowed_token_ids",
            "min_tokens",
            "output_kind",
            "detokenize",
            "extra_args",
        )
    ),
    "vllm.sampling_params:StructuredOutputsParams": Used(passes=("grammar",)),
    "vllm.pooling_params:PoolingParams": Used(passes=("task", "skip_reading_prefix_cache")),
    "vllm.v1.structured_output.backend_guidance:validate_guidance_grammar": Used(passes=("sampling_params", "/")),
    "vllm.lora.request:LoRARequest": Used(
        passes=("lora_name", "lora_int_id", "lora_path", "/"), reads=("lora_int_id",)
    ),
    "vllm.lora.peft_helper:PEFTHelper": Used(
        reads=("r", "rank_pattern"), calls={"from_dict": ("config_dict", "/"), "validate_legal": ("lora_config", "/")}
    ),
    "vllm.distributed.kv_events:EventBatch": Used(reads=("ts", "events", "data_parallel_rank")),
    "vllm.distributed.kv_events:BlockStored": Used(reads=tuple(field.name for field in fields(BlockStored))),
    "vllm.distributed.kv_events:BlockRemoved": Used(reads=tuple(field.name for field in fields(BlockRemoved))),
    "vllm.distributed.kv_events:AllBlocksCleared": Used(),
    "vllm.v1.metrics.loggers:StatLoggerBase": Used(
        overrides={
            "record": ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
            "log_engine_initialized": (),
        }
    ),
    "vllm.v1.metrics.prometheus:get_prometheus_registry": Used(),
    "vllm.v1.metrics.stats:SchedulerStats": Used(
        reads=(
            "num_running_reqs",
            "num_waiting_reqs",
            "num_skipped_waiting_reqs",
            "kv_cache_usage",
            "prefix_cache_stats",
            "kv_connector_stats",
            "ec_connector_stats",
        )
    ),
    "vllm.v1.metrics.stats:PrefixCacheStats": Used(reads=("queries", "hits")),
    "vllm.v1.metrics.stats:IterationStats": Used(
        reads=("prompt_token_stats", "num_generation_tokens", "num_preempted_reqs")
    ),
    "vllm.v1.metrics.stats:PromptTokenStats": Used(reads=("computed",)),
    "vllm.v1.metrics.stats:RequestStateStats": Used(reads=("queued_ts", "scheduled_ts", "first_token_ts")),
    "vllm.config.load:LoadConfig": Used(reads=("load_format",)),
    "vllm.distributed.ec_transfer.ec_connector.base:ECConnectorBase": Used(
        reads=("_connector_metadata",),
        calls={"_get_connector_metadata": ()},
        overrides={
            "__init__": ("vllm_config", "role"),
            "ensure_cache_available": ("request", "num_computed_tokens"),
            "has_cache_item": ("identifier",),
            "update_state_after_alloc": ("request", "index"),
            "build_connector_meta": ("scheduler_output",),
            "update_connector_output": ("connector_output",),
            "request_finished": ("request",),
            "get_ec_connector_stats": (),
            "start_save_caches": (),
            "start_load_caches": ("encoder_cache",),
            "save_caches": ("encoder_cache", "mm_hash"),
            "build_connector_worker_meta": (),
            "shutdown": (),
            "build_ec_connector_stats": ("data",),
        },
    ),
    "vllm.distributed.ec_transfer.ec_connector.base:ECConnectorMetadata": Used(),
    "vllm.distributed.ec_transfer.ec_connector.base:ECConnectorRole": Used(reads=("SCHEDULER",)),
    "vllm.distributed.ec_transfer.ec_connector.base:ECConnectorWorkerMetadata": Used(
        overrides={"aggregate": ("other",)}
    ),
    "vllm.distributed.ec_transfer.ec_connector.encoder_output_width:get_encoder_output_width": Used(
        passes=("vllm_config", "modality", "/")
    ),
    "vllm.distributed.ec_transfer.ec_connector.metrics:ECConnectorStats": Used(
        passes=("data",),
        reads=("data",),
        overrides={"reset": (), "aggregate": ("other",), "reduce": (), "is_empty": ()},
    ),
    "vllm.distributed.parallel_state:get_tp_group": Used(),
    "vllm.distributed.parallel_state:GroupCoordinator": Used(reads=("rank_in_group",)),
    "vllm.multimodal.inputs:MultiModalFeatureSpec": Used(reads=("identifier", "mm_position")),
    "vllm.v1.core.sched.output:SchedulerOutput": Used(reads=("num_scheduled_tokens", "free_encoder_mm_hashes")),
    "vllm.v1.outputs:ECConnectorOutput": Used(reads=("ec_connector_worker_meta",)),
    "vllm.v1.request:Request": Used(reads=("request_id", "mm_features", "cache_salt", "num_computed_tokens")),
}

CONNECTOR: Table = {
    "vllm:__version__": Used(),
    "vllm.config:get_current_vllm_config_or_none": Used(),
    "vllm.config:VllmConfig": Used(
        reads=(
            "model_config",
            "cache_config",
            "parallel_config",
            "kv_transfer_config",
            "load_config",
            "speculative_config",
            "weight_transfer_config",
            "compilation_config",
        )
    ),
    "vllm.config:KVTransferConfig": Used(
        reads=("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config")
    ),
    "vllm.config.model:ModelConfig": Used(
        reads=(
            "dtype",
            "quantization",
            "max_model_len",
            "hf_config",
            "model",
            "revision",
            "served_model_name",
            "use_mla",
        )
    ),
    "vllm.config.cache:CacheConfig": Used(reads=("enable_prefix_caching", "cache_dtype", "block_size")),
    "vllm.config.parallel:ParallelConfig": Used(
        reads=(
            "data_parallel_size",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "data_parallel_rank",
            "world_size",
        )
    ),
    "vllm.config.load:LoadConfig": Used(reads=("load_format",)),
    "vllm.config.speculative:SpeculativeConfig": Used(reads=("model",)),
    "vllm.config.compilation:CompilationConfig": Used(reads=("static_forward_context",)),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": Used(
        reads=("_registry",), calls={"register_connector": ("name", "module_path", "class_name", "/")}
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": Used(
        reads=("_cache_hit_source", "_kv_cache_config", "requires_kv_delivery"),
        calls={"_get_connector_metadata": ()},
        overrides={
            **CONNECTOR_METHODS,
            "get_required_kvcache_layout": ("vllm_config",),
            "build_kv_connector_stats": ("data",),
            "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
        },
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorMetadata": Used(),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole": Used(),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata": Used(
        overrides={"aggregate": ("other",)}
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats": Used(
        passes=("data",),
        reads=("data",),
        overrides={"reset": (), "aggregate": ("other",), "reduce": (), "is_empty": ()},
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics": Used(
        reads=("_counter_cls", "_gauge_cls", "per_engine_labelvalues"),
        overrides={
            "__init__": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
            "observe": ("transfer_stats_data", "engine_idx"),
        },
    ),
    "vllm.distributed.parallel_state:get_pp_group": Used(),
    "vllm.distributed.parallel_state:get_tp_group": Used(),
    "vllm.distributed.parallel_state:GroupCoordinator": Used(reads=("rank_in_group", "world_size")),
    "vllm.lora.request:LoRARequest": Used(reads=("lora_name", "lora_int_id", "lora_path", "load_inplace")),
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": Used(calls={"get_attn_backend": ()}),
    "vllm.multimodal.inputs:MultiModalFeatureSpec": Used(reads=("identifier", "mm_position")),
    "vllm.multimodal.inputs:PlaceholderRange": Used(reads=("offset", "length")),
    "vllm.platforms:current_platform": Used(),
    "vllm.platforms.interface:Platform": Used(calls={"is_cpu": ()}),
    "vllm.v1.attention.backend:AttentionBackend": Used(calls={"get_name": ()}),
    "vllm.v1.core.block_pool:BlockPool": Used(
        reads=("blocks",),
        calls={
            "touch": ("blocks", "/"),
            "free_blocks": ("ordered_blocks", "/"),
            "get_num_free_blocks": (),
            "get_new_blocks": ("num_blocks", "/"),
            "cache_full_blocks": (
                "request",
                "blocks",
                "num_cached_blocks",
                "num_full_blocks",
                "block_size",
                "kv_cache_group_id",
                "/",
            ),
        },
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": Used(reads=("blocks",), calls={"get_block_ids": ()}),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": Used(
        reads=("block_pool",), calls={"get_blocks": ("request_id", "/")}
    ),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": Used(reads=("block_id", "ref_cnt", "is_null", "block_hash")),
    "vllm.v1.core.sched.output:SchedulerOutput": Used(reads=("num_scheduled_tokens",)),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": Used(reads=("dtype", "num_kv_heads", "head_size", "block_size")),
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": Used(reads=("dtype", "num_kv_heads", "head_size", "block_size")),
    "vllm.v1.kv_cache_interface:KVCacheConfig": Used(
        reads=("kv_cache_groups", "needs_kv_cache_zeroing", "num_blocks", "kv_cache_layout")
    ),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": Used(reads=("kv_cache_spec", "layer_names")),
    "vllm.v1.kv_cache_layout:KVCacheLayout": Used(reads=("BLNHC",)),
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": Used(reads=("HOST", "DISK")),
    "vllm.v1.outputs:KVConnectorOutput": Used(reads=("kv_connector_worker_meta",)),
    "vllm.v1.request:Request": Used(
        reads=(
            "request_id",
            "lora_request",
            "mm_features",
            "prompt_embeds",
            "resumable",
            "cache_salt",
            "all_token_ids",
            "skip_reading_prefix_cache",
            "num_tokens",
            "num_computed_tokens",
            "num_in_flight_tokens",
            "kv_transfer_params",
        )
    ),
}
