#!/bin/sh
# LiteLLM's proxy at 4000, in front of `headrace route`, in front of two vLLM servers. SERVERS has the URLs of others.
set -eu
cd "$(dirname "$0")"
: "${LITELLM_MASTER_KEY:?the key that LiteLLM asks of its clients: sk- and 32 random bytes in hex}"
setsid headrace route ${SERVERS:-http://127.0.0.1:8001 http://127.0.0.1:8002} "$@" &
trap 'kill $! 2>/dev/null || exit; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
litellm --config litellm.yaml --host 127.0.0.1 --port 4000
