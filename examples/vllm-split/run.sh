#!/bin/sh
# vLLM as the engine; one worker computes prompts, another one decodes, each on a GPU of its own: ./run.sh ORG/NAME.
set -eu
exec headrace up --engine vllm --prefill 1 --decode 1 --model "$@"
