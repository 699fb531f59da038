#!/bin/sh
# A small real model on the CPU, with one process of each kind.
set -eu
exec headrace up --workers 1 --frontends 1 --routers 1 "$@"
