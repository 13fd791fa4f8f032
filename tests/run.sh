#!/usr/bin/env bash
# Passes the tests on a fresh machine: makes a virtual environment, installs everything, checks style and types, runs all.
#
#   bash tests/run.sh              everything (half an hour on 2 cores that do nothing else)
#   bash tests/run.sh unit         without the runs of the real pipeline
#   bash tests/run.sh matrix       more runs of the real pipeline: presets, trainer modes and faults (an hour or more)
#   bash tests/run.sh fuzz         files and settings, many more examples than by default (VERL_ADAPTIVE_FUZZ, 100)
#   bash tests/run.sh -k NAME      any arguments of pytest
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${VENV:-.venv}"
bash scripts/install.sh "$venv" --dev
# shellcheck disable=SC1091
. "$venv/bin/activate"

# The report is tested in a real browser: Debian's package, where this script may install.
missing=()
command -v chromium >/dev/null 2>&1 || missing+=(chromium)
if ((${#missing[@]})) && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
        >/dev/null || echo "run.sh: could not install ${missing[*]}; the tests that need them will say so" >&2
fi

ruff format --check .
ruff check .
mypy verl_adaptive verl_cpu
lint-imports

if [ "${1:-}" = unit ]; then
    shift
    exec python -m pytest -m "not e2e and not matrix" -n 2 "$@"
fi
if [ "${1:-}" = matrix ]; then
    shift
    exec python -m pytest -m matrix "$@"
fi
if [ "${1:-}" = fuzz ]; then
    shift
    VERL_ADAPTIVE_FUZZ="${VERL_ADAPTIVE_FUZZ:-100}" exec python -m pytest tests/fuzz -n 2 --timeout 0 "$@"
fi
if (($#)); then
    exec python -m pytest "$@"
fi
# One run of the pipeline at a time: two side by side were slower than one after the other. But for most of its minutes one
# process after another imports verl, on one core. The other tests take what that leaves, and say at the end what came of
# them; those that start a Ray come after, because Ray gives its own processes 30 s to answer, on a machine however busy.
# Job control, so that they can be interrupted: what runs beside a script would ignore it, and all that it starts.
set -m
said=$(mktemp)
nice -n 19 python -m pytest -m "not e2e and not matrix and not ray" -n 2 >"$said" 2>&1 </dev/null &
others=$!
trap 'kill -INT -- "-$others" 2>/dev/null && wait "$others" || :; rm -f "$said"' EXIT
failed=0
run() {  # a marker, where its tests are, and more
    local status=0
    python -m pytest -m "$1 and not matrix" "${@:2}" || status=$?
    [ "$status" -ne 2 ] || exit 2  # interrupted
    [ "$status" -eq 0 ] || failed=$status
}
run e2e tests/e2e
run ray tests -n 2
echo "run.sh: waiting for the tests without the pipeline"
wait "$others" || failed=$?
cat "$said"
exit "$failed"
