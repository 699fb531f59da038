#!/bin/sh
# Restarts the containers of this Compose project, one after the other, so that no request is lost (docs/decisions/0042):
#   ./roll.sh                                workers, routers, frontends, with the images and settings that are there now
#   ./roll.sh frontend                       these services alone
#   docker compose build && ./roll.sh        an upgrade; kvbm goes before it (docs/upgrade.md)
#   COMPOSE_FILE=compose.yaml:compose.keys.yaml ./roll.sh        with overlays, as Compose itself takes them
# Each container drains and is removed; Compose makes a new one in its place. The next container follows only when all of
# the service are healthy. So each service needs at least two. If one is not healthy within HEALTHY_WITHIN_S (600), this
# ends with status 1; then `docker compose up --detach --no-recreate` makes what is missing.
set -eu
cd "$(dirname "$0")"
healthy_within_s=${HEALTHY_WITHIN_S:-600}
[ $# -gt 0 ] || set -- worker router frontend

now() { date +%s; }
running() { docker compose ps --quiet "$1"; }
count() { echo "$1" | grep -c . || true; }

healthy() { # number of healthy containers of service $1
    each=$(running "$1")
    [ -n "$each" ] || { echo 0; return; }
    # shellcheck disable=SC2086
    docker inspect --format '{{.State.Health.Status}}' $each | grep -c '^healthy$' || true
}

noticed() { # number of frontends that the balancer uses; without a balancer, number of running frontends
    [ -n "$(running balancer 2>/dev/null)" ] || { running frontend | grep -c .; return; }
    docker compose exec -T balancer wget -Y off -q -O - http://127.0.0.1:9100/ready || echo 0
}

until_all() { # wait until $2 containers of service $1 are healthy
    end=$(($(now) + healthy_within_s))
    until [ "$(healthy "$1")" -ge "$2" ] && { [ "$1" != frontend ] || [ "$(noticed)" -ge "$2" ]; }; do
        [ "$(now)" -lt "$end" ] || { echo "$1: $(healthy "$1") of $2 are healthy after $healthy_within_s s" >&2; exit 1; }
        sleep 1
    done
}

for service; do
    containers=$(running "$service")
    replicas=$(count "$containers")
    [ "$replicas" -ge 2 ] || { echo "$service: $replicas run, and 2 are needed so that no request is lost" >&2; exit 1; }
    until_all "$service" "$replicas"
    for container in $containers; do
        echo "$service: $(docker inspect --format '{{.Name}}' "$container")"
        docker stop "$container" >/dev/null
        docker rm "$container" >/dev/null
        docker compose up --detach --no-deps --no-recreate --no-build --scale "$service=$replicas" "$service"
        until_all "$service" "$replicas"
    done
done
