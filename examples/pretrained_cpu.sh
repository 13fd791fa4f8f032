#!/usr/bin/env bash
# From nothing to one comparison on a pretrained language model (SmolLM2-135M), on real verl and vLLM, without a GPU:
# GRPO and solo at the same number of generated rollouts. 10 to 30 minutes a run on two cores with AVX-512.
#
#   examples/pretrained_cpu.sh [options of benchmarks/pretrained.py]
#
# The model comes from the package index (98 MB, Apache-2.0). Running it again goes on with what is missing.
# VENV names the virtual environment (default: .venv in the checkout).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
"$root/scripts/install.sh" "$venv"
unset PYTHONDONTWRITEBYTECODE
cd "$root"
if (($# == 0)); then
    set -- --presets "grpo;solo" --lrs 1e-5 --seeds 1 --results "$root/outputs/pretrained/results.jsonl"
fi
exec "$venv/bin/python" -m benchmarks.pretrained "$@"
