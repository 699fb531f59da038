#!/bin/sh
# Envoy at 8080 asks the picker at 9002 which of two vLLM servers gets a request. ENVOY names another program.
set -eu
cd "$(dirname "$0")"
setsid headrace route http://127.0.0.1:8001 http://127.0.0.1:8002 --set frontend.picker.port=9002 \
    --set frontend.picker.endpoints=2 "$@" &
trap 'kill $! 2>/dev/null || exit; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"${ENVOY:-envoy}" --config-path envoy.yaml
