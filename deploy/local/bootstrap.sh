# Sourced by `headrace` and `check`: makes sure that $root/.venv matches a lock file.
# If it does, this costs one `cmp`; else deploy/local/install.py installs it.

# usage: bootstrap LOCKFILE
bootstrap() {
    if [ -x "$root/.venv/bin/python" ] && cmp -s "$root/$1" "$root/.venv/headrace/$1"; then
        return 0
    fi
    python=$(find_python) || exit 1
    "$python" -I "$root/deploy/local/install.py" "$root" "$1" || exit $?
}

# Prints the first Python that is new enough. If $PYTHON is set, no other is tried.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3.13 python3.12 python3.11 python3
    fi
    for candidate; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    echo "error: Headrace needs Python 3.11 or newer; tried: $* (choose another with PYTHON=/path/to/python)" >&2
    return 1
}
