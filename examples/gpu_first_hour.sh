#!/usr/bin/env bash
# The first hour on a GPU, one command: selftest, then GRPO, solo and greso on GSM8K with Qwen2.5-0.5B-Instruct, at the same
# number of generated rollouts, with reports, a comparison and one page to send. On GPUs its selftest was run here
# (docs/verl_versions.md#on-a-gpu); its every step is run on a CPU with a tiny model (--cpu-rehearsal).
#
#   bash examples/gpu_first_hour.sh                       in the environment that you train in
#   bash examples/gpu_first_hour.sh --seeds 1 2 3 --steps 40
#   bash examples/gpu_first_hour.sh --model FOLDER --data FOLDER -- OVERRIDES     where no hub is, or for a task of yours
#   bash examples/gpu_first_hour.sh --cpu-rehearsal       minutes, and no GPU
#
# The same command goes on where it was interrupted. The options are those of examples/gpu_first_hour.py.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu_first_hour.py" "$@"
