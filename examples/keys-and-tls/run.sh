#!/bin/sh
# An API that asks for a key, and has TLS only. Key and certificate are made here at the first start. `./run.sh` alone is
# `headrace up`; `./run.sh route URL URL` is in front of vLLM servers.
set -eu
cd "$(dirname "$0")"
[ -e keys.toml ] || headrace key new alice --file keys.toml --out alice.key --requests-per-minute 600 --salt own
[ -e tls.pem ] || openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=localhost \
    -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout tls.key -out tls.pem
[ $# -gt 0 ] || set -- up
exec headrace "$@" --keys keys.toml --tls-cert tls.pem --tls-key tls.key
