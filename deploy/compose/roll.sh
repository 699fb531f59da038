#!/bin/sh
# Restarts the containers of this Compose project, one after the other, so that no request is lost:
#   ./roll.sh                                workers, routers, frontends, with the images and settings that are there now
#   ./roll.sh frontend                       these services alone
#   docker compose build && ./roll.sh        an upgrade
#   COMPOSE_FILE=compose.yaml:compose.keys.yaml ./roll.sh        with overlays, as Compose itself takes them
# Each container drains and is removed; Compose makes a new one in its place, and only when that is healthy the next one
# goes. So each service needs two of them or more. A container that does not get healthy ends it, status 1; what is
# missing then is made by: docker compose up --detach --no-recreate
set -eu
cd "$(dirname "$0")"
healthy_within_s=${HEALTHY_WITHIN_S:-600}
[ $# -gt 0 ] || set -- worker router frontend

running() { docker compose ps --quiet "$1"; }
count() { echo "$1" | grep -c . || true; }

# The balancer, where there is one: as many frontends as run are ready for it, too.
noticed() {
    [ -n "$(running balancer 2>/dev/null)" ] || return 0
    end=$(($(date +%s) + 60))
    until [ "$(docker compose exec -T balancer wget -q -O - http://127.0.0.1:9100/ready || echo 0)" -ge "$1" ]; do
        [ "$(date +%s)" -lt "$end" ] || { echo "the balancer sees fewer than $1 frontends" >&2; exit 1; }
        sleep 1
    done
}

for service; do
    containers=$(running "$service")
    replicas=$(count "$containers")
    [ "$replicas" -ge 2 ] || { echo "$service: $replicas run, and 2 are needed so that no request is lost" >&2; exit 1; }
    for container in $containers; do
        echo "$service: $(docker inspect --format '{{.Name}}' "$container")"
        docker stop "$container" >/dev/null
        docker rm "$container" >/dev/null
        docker compose up --detach --no-deps --no-recreate --no-build --scale "$service=$replicas" \
            --wait --wait-timeout "$healthy_within_s" "$service"
        [ "$service" != frontend ] || noticed "$replicas"
    done
done
