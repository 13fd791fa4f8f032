#!/usr/bin/env bash
# Never run on GPUs here: composed and validated only. Statistics in a PostgreSQL database that several runs share.
#
# STORE is the database's URL, for example postgresql+psycopg://user@host/verl_adaptive (pip install
# "psycopg[binary]"); RUN names this run in it. Runs do not mix; `verl-adaptive stats "$STORE#verl_adaptive/$RUN"`
# reads one while it trains. Passwords belong in ~/.pgpass or PGPASSWORD, not on the command line.
#
#   python examples/prepare_math.py --set dapo+math --out data/math
#   bash examples/shared_postgresql.sh [further overrides]
#
# Everything else is examples/qwen2.5_math_1.5b_greso.sh, with its variables (MODEL, DATA, OUT, GPUS, NODES);
# DRY_RUN=1 prints the whole command. `verl-adaptive doctor -- $(DRY_RUN=1 bash examples/shared_postgresql.sh)`
# checks it and shows the budget.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run=${RUN:-greso_shared}
export OUT=${OUT:-checkpoints/verl_adaptive/$run}

exec bash "$here/qwen2.5_math_1.5b_greso.sh" \
    adaptive.store.url="${STORE:-postgresql+psycopg://localhost/verl_adaptive}" \
    adaptive.store.run_id="verl_adaptive/$run" \
    trainer.experiment_name="$run" \
    "$@"
