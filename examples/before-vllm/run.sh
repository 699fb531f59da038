#!/bin/sh
# One address in front of two vLLM servers. SERVERS has the URLs of others.
set -eu
exec headrace route ${SERVERS:-http://127.0.0.1:8001 http://127.0.0.1:8002} "$@"
