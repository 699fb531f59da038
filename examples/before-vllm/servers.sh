#!/bin/sh
# Two `vllm serve`, each on a GPU of its own, until Ctrl-C: ./servers.sh ORG/NAME. More words go to both.
set -eu

serve() { # GPU, port of the API, port of the KV events, port of their replay; then what `vllm serve` is given
    gpu=$1 port=$2 events=$3 replay=$4
    shift 4
    CUDA_VISIBLE_DEVICES=$gpu exec vllm serve "$@" --host 127.0.0.1 --port "$port" --kv-events-config '{
        "enable_kv_cache_events": true, "publisher": "zmq",
        "endpoint": "tcp://*:'"$events"'", "replay_endpoint": "tcp://*:'"$replay"'"}'
}

serve 0 8001 5557 5558 "$@" &
first=$!
serve 1 8002 5567 5568 "$@" &
trap 'kill $first $! 2>/dev/null' INT TERM
wait
