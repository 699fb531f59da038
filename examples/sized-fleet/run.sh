#!/bin/sh
# Measures one worker, finds the cheapest fleet for a load and its targets, and starts it: ./run.sh FLAGS of up.
# PROFILE, LOAD and TARGETS change what is measured and wanted.
set -eu
[ -e profile.json ] || headrace profile ${PROFILE:---longest 2048 --most 16} -- "$@"
headrace plan ${LOAD:---rate 2 --prompt-tokens 600 --output-tokens 40} ${TARGETS:---ttft-p90 1 --itl-p99 0.3}
exec headrace up @plan.up
