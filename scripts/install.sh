#!/usr/bin/env bash
# Installs this project with everything that verl's CPU pipeline needs into a virtual environment.
#
#   scripts/install.sh [--dev] [--force] [VENV]
#
#   VENV     the virtual environment, made if it does not exist (default: .venv in the checkout)
#   --dev    with what the tests and linters need
#   --force  install even if nothing has changed since the last time
#
# Running it again is instant. PYTHON chooses the interpreter (default: python3; 3.10 or newer, tested with 3.11).
# Packages come from where pip and uv are set up to find them; about 4 GB on disk.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
extras=cpu
force=false
for argument in "$@"; do
    case $argument in
        --dev) extras=cpu,dev ;;
        --force) force=true ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) echo "install.sh: unknown option $argument (see --help)" >&2; exit 2 ;;
        *) venv=$argument ;;
    esac
done

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

# Run a command, its output in $log, under one bar: packages fetched, then unpacked into the environment; what is left is
# guessed from that. Without a terminal: run it, and say nothing.
under_a_bar() {
    local job begun=$SECONDS fetched placed held=0 percent=0 spent left bar
    "$@" >"$log" 2>&1 &
    job=$!
    trap 'kill "$job" 2>/dev/null; exit 130' INT TERM
    held=$(find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l)
    while [ -t 1 ] && kill -0 "$job" 2>/dev/null; do
        fetched=$(find "$cache"/archive-v* -maxdepth 1 -newer "$marker" 2>/dev/null | wc -l)
        placed=$(($(find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l) - held))
        if [ "$placed" -gt 0 ]; then
            percent=$((70 + 25 * (placed < packages ? placed : packages) / packages))
        else
            percent=$((70 * (fetched < packages ? fetched : packages) / packages))
        fi
        spent=$((SECONDS - begun))
        left=$([ "$percent" -lt 5 ] && echo "a few minutes" || echo "about $(((spent * (100 - percent) / percent + 60) / 60)) min left")
        bar=$(printf '%*s' $((percent * 30 / 100)) '' | tr ' ' '#')
        printf '\r    [%-30s] %3d%%  %d:%02d  %-20s' "$bar" "$percent" $((spent / 60)) $((spent % 60)) "$left"
        sleep 1
    done
    [ -t 1 ] && printf '\r%80s\r' ''
    wait "$job"
}

# Bytecode is worth 90 s at the start of every run: a dozen processes import verl and vLLM.
unset PYTHONDONTWRITEBYTECODE

python=${PYTHON:-python3}
[ -x "$venv/bin/python" ] && python=$venv/bin/python
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$python is older than 3.10; set PYTHON"

constraints=$root/scripts/requirements-cpu.txt
overrides=$root/scripts/overrides.txt
torch=$(sed -n 's/^torch==//p' "$constraints")
stamp=$venv/.verl-adaptive-installed
state=$(
    { "$python" --version; echo "$root"; cat "$constraints" "$overrides" "$root/setup.cfg" "${BASH_SOURCE[0]}"; } |
        "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
)
# One line for each set of extras that is installed: what serves --dev serves without it, too.
if [ "$force" = false ] && [ -f "$stamp" ] && grep -qx "$extras $state" "$stamp"; then
    say "$venv is up to date"
    exit 0
fi

if [ ! -x "$venv/bin/python" ]; then
    say "Making $venv"
    "$python" -m venv "$venv" || fail "could not make a virtual environment (Debian and Ubuntu: install python3-venv)"
fi
python=$venv/bin/python
rm -f "$stamp"

say "Installing pip and uv"
"$python" -m pip install --quiet --upgrade pip uv

# PyPI's torch for Linux is a CUDA build. Either pip is set up to find a CPU build, which uv would not see because it does
# not read pip's configuration, or uv fetches PyTorch's own, whose index it knows.
wheels=$venv/.wheels
mkdir -p "$wheels"
if "$python" -m pip download --quiet --no-deps --dest "$wheels" "torch==$torch+cpu" 2>/dev/null; then
    say "torch $torch: the CPU build that pip finds"
    source=(--find-links "$wheels" "torch==$torch+cpu")
else
    say "torch $torch: PyTorch's CPU build"
    source=(--torch-backend=cpu)
fi

log=$venv/install.log
packages=228  # about as many as all of them come to
cache=$("$python" -m uv cache dir)
marker=$wheels/marker
touch "$marker"
say "Installing verl, vLLM and this project [$extras]: about $packages packages, some minutes (log: $log)"
under_a_bar "$python" -m uv pip install --python "$python" --compile-bytecode \
    --constraint "$constraints" --override "$overrides" --editable "$root[$extras]" "${source[@]}" ||
    { tail -n 20 "$log" >&2; fail "installation failed. uv does not read pip's configuration: set UV_INDEX or UV_DEFAULT_INDEX if you use a mirror"; }

say "Checking"
VERL_PLATFORM=cpu "$python" - <<'CHECK' || fail "the installation does not work; see above. Try again with --force and a fresh VENV"
import logging
import sys
from importlib.metadata import PackageNotFoundError, version

logging.disable(logging.CRITICAL)
for name in ("torchvision", "torchaudio", "torchcodec"):
    try:
        found = version(name)
    except PackageNotFoundError:
        continue
    if "+cpu" not in found:
        sys.exit(f"{name} {found} is here and may be a CUDA build: uninstall it, or take another VENV")

import torch  # noqa: E402

if torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees a GPU: this is not a CPU build")

import verl  # noqa: E402
import vllm  # noqa: E402
from verl.plugin.platform import get_platform  # noqa: E402
from verl.third_party.vllm import vllm_version  # noqa: E402

if get_platform().device_name != "cpu":
    sys.exit(f"verl chose the platform {get_platform().device_name!r}; is this project's verl plugin installed?")
print(f"torch {torch.__version__}, vllm {vllm_version}, verl {verl.__version__}: working, on CPU")
CHECK

{ echo "$extras $state"; echo "cpu $state"; } >"$stamp"
rm -rf "$wheels"
say "Installed. Activate it with: . $venv/bin/activate"
