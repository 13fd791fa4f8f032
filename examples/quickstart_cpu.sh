#!/usr/bin/env bash
# From nothing to a comparison of GRPO, GRPO in groups of 4 and a preset on real verl and vLLM, without a GPU:
# the README says how long it takes. Running it again reuses what exists; `--fresh` starts over.
#
#   examples/quickstart_cpu.sh [options of examples/cpu/quickstart.py]
#
# VENV names the virtual environment (default: .venv in the checkout).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
"$root/scripts/install.sh" "$venv"
unset PYTHONDONTWRITEBYTECODE
exec "$venv/bin/python" "$root/examples/cpu/quickstart.py" "$@"
