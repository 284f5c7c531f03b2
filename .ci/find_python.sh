#!/bin/sh
# Prints the path of a Python that really runs and can make environments.
#   find_python.sh            python3 if it is at least 3.11, else the newest other one that is
#   find_python.sh NAME       NAME, if it is at least 3.11
#   find_python.sh --newest   the newest release from 3.12 to 3.14; prints nothing and exits 1 where there is none
# Looks on PATH and among pyenv's versions (a pyenv shim may exist and still not run).
set -u

# Prints "rank path" for a usable interpreter, "novenv path" where venv is missing, nothing otherwise.
# Written to run on Python 2 as well; the base interpreter is named, never an active environment's.
probe() {
    "$1" -c '
import sys
v = sys.version_info
if v >= (3, 11) and v[3] == "final" and "free-threading" not in sys.version:
    path = getattr(sys, "_base_executable", None) or sys.executable
    try:
        import ensurepip, venv
        print("%03d%03d%03d %s" % (v[0], v[1], v[2], path))
    except ImportError:
        print("novenv " + path)
' 2>/dev/null </dev/null
}

candidates() {
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        command -v "$name"
    done
    root=$(pyenv root 2>/dev/null) || root=${PYENV_ROOT:-${HOME:-}/.pyenv}
    for path in "$root"/versions/*/bin/python3; do
        [ -x "$path" ] && echo "$path"
    done
}

fail() {
    echo "hetero_kv needs Python 3.11 or newer: $1" >&2
    exit 1
}

case "${1:-}" in
--newest)
    found=$(candidates | while read -r path; do probe "$path"; done |
        grep -E '^003(012|013|014)' | sort | tail -n 1)
    [ -n "$found" ] || exit 1
    echo "${found#* }"
    ;;
"")
    found=$(probe python3)
    case "$found" in
    "" | novenv*)
        found=$(candidates | while read -r path; do probe "$path"; done | sort)
        usable=$(echo "$found" | grep '^003' | tail -n 1)
        [ -n "$usable" ] || case "$found" in
        *novenv*) fail "${found#* } has no venv module (on Debian: apt-get install python3-venv)" ;;
        *) fail "none was found; name one with PYTHON=/path/to/python3" ;;
        esac
        found=$usable
        ;;
    esac
    echo "${found#* }"
    ;;
*)
    found=$(probe "$1")
    case "$found" in
    "") fail "PYTHON=$1 is older, or does not run" ;;
    novenv*) fail "PYTHON=$1 has no venv module (on Debian: apt-get install python3-venv)" ;;
    esac
    echo "${found#* }"
    ;;
esac
