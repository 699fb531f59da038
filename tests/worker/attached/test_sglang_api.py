"""Our attempts as requests to an SGLang server, and its lines as outputs."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import fields

from services.worker.attached.api import ServerOutput
from services.worker.attached.sglang_api import ROWS, SGLANG
from services.worker.config import AttachedConfig
from shared.errors import ConfigError, InvalidRequest
from shared.messages.generate import Sampling
from tests.worker.attached.test_vllm_api import FULL, submit


def test_each_field_has_a_row() -> None:
    assert ROWS.keys() == {field.name for field in fields(Sampling)}


def test_fields_have_the_servers_names() -> None:
    found: dict[str, object] = {}
    for name, row in ROWS.items():
        if name != "logprobs":
            found |= row(FULL, 0)
    wanted = {"max_new_tokens": 9, "min_new_tokens": 4, "sampling_seed": 7, "top_k": 3, "logit_bias": {"3": -100.0}}
    assert {name: found[name] for name in wanted} == wanted
    assert ROWS["top_k"](Sampling(max_tokens=1), 0) == {"top_k": -1}


def test_what_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling\.logprobs: "):
        ROWS["logprobs"](FULL, 0)
    with pytest.raises(InvalidRequest, match=r"^salt: "):
        SGLANG.body(submit(FULL, salt="s"), AttachedConfig(), "m", {})


def test_lines_with_all_tokens_and_with_new_ones_become_outputs() -> None:
    def read(line: object, seen: int) -> ServerOutput:
        return SGLANG.read(msgspec.json.encode(line), submit(FULL), seen)

    meta: dict[str, object] = {"completion_tokens": 3, "cached_tokens": 8}
    assert read({"output_ids": [5, 6, 7], "meta_info": meta}, 1) == ServerOutput([6, 7], None, 8)
    assert read({"output_ids": [6, 7], "meta_info": meta}, 1) == ServerOutput([6, 7], None, 8)
    ended = meta | {"finish_reason": {"type": "length", "length": 3}}
    assert read({"output_ids": [5, 6, 7], "meta_info": ended}, 3) == ServerOutput([], "length", 8)
    ended = meta | {"finish_reason": {"type": "abort", "message": "why"}}
    assert read({"output_ids": [], "meta_info": ended}, 3).finish == "abort: why"
    assert read({"error": {"message": "broken"}}, 0) == ServerOutput(error="broken")
    for ids, count, seen in (([5, 6, 7], 0, 1), ([5], 4, 0)):
        with pytest.raises(ValueError, match="completion_tokens is"):
            read({"output_ids": ids, "meta_info": {"completion_tokens": count}}, seen)
    with pytest.raises(ConfigError, match="text for token ids"):
        read({"text": "a", "meta_info": meta}, 0)


def test_sizes_are_those_of_its_server_info() -> None:
    path, read = SGLANG.sizes
    assert path == "/server_info"
    info: dict[str, object] = {"page_size": 16, "max_total_num_tokens": 4100, "dp_size": 2, "launch_command": "..."}
    assert read(msgspec.json.encode(info).decode()) == (16, 256, 0)
    events = {"publisher": "zmq", "endpoint_port_base": 5557, "block_size": 16, "dp_size": 2}
    assert read(msgspec.json.encode(info | {"kv_events": events}).decode()) == (16, 256, 2)
    for text in ("", "<html>", '{"page_size": null, "kv_events": null}', '{"page_size": "16"}', "[]"):
        assert read(text) == (0, 0, 0)
