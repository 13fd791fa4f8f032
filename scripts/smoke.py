"""Smoke test of an installed verl-adaptive, in an environment without verl, torch and Ray.

    python scripts/smoke.py [--version 0.2.0] [--with-verl]

Makes a small store with the package itself and tries what a user tries first: the version, the list of parts, the
statistics, an export, the report, a filtered data set, Hydra's presets; and that nothing heavy is imported on the way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

HEAVY = ("verl", "torch", "ray", "vllm", "transformers", "pandas")


def call(*words: str, status: int = 0) -> str:
    """Run ``verl-adaptive`` as installed; what it printed.

    Raises:
        SystemExit: another status, or a traceback.
    """
    program = Path(sys.executable).with_name("verl-adaptive")
    done = subprocess.run([str(program), *words], capture_output=True, text=True, check=False)
    if done.returncode != status or "Traceback" in done.stderr:
        sys.exit(
            f"verl-adaptive {' '.join(words)}: status {done.returncode}, expected {status}\n{done.stdout}{done.stderr}"
        )
    print(f"ok  verl-adaptive {' '.join(os.path.basename(w) if '/' in w else w for w in words)}")
    return done.stdout if status == 0 else done.stderr


def make_store(folder: Path) -> Path:
    """A journal of three steps and its data set; the data set."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl_adaptive.groups import Groups
    from verl_adaptive.stats import Journal, StatsTable, dataset_keys

    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        }
        for i in range(32)
    ]
    data = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), data)
    keys = dataset_keys(rows)
    table = StatsTable()
    row_of = table.rows_for(keys)
    draw = np.random.default_rng(0)
    account = {"generated": 256, "trained": 256, "surplus": 0, "held": 0, "dropped": {}}
    ledger = {name: {"rollouts": account, "tokens": account} for name in ("step", "run")}
    with Journal(folder / "adaptive", {"run": "smoke/test", "preset": "greso"}) as journal:
        journal.begin(0, keys, ["sums"] * 32)
        for step in (1, 2, 3):
            rewards = (draw.random((32, 8)) < np.linspace(0, 1, 32)[:, None]).astype(float)
            groups = Groups.from_lists(row_of, rewards.tolist())
            journal.commit_step(step, groups, keys, ["trained"] * 32, ledger, {}, sources=["sums"] * 32)
    return data


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default=version("verl-adaptive"), help="what must be installed")
    parser.add_argument("--with-verl", action="store_true", help="verl is installed here, too")
    args = parser.parse_args()
    present = [name for name in HEAVY if find_spec(name) is not None]
    if present and not args.with_verl:
        sys.exit(f"this environment is not clean: {', '.join(present)} are installed (--with-verl allows it)")
    assert call("--version") == f"verl-adaptive {args.version}\n"
    module = subprocess.run(
        [sys.executable, "-m", "verl_adaptive", "--version"], capture_output=True, text=True, check=True
    )
    assert module.stdout == f"verl-adaptive {args.version}\n"
    light = f"import sys, verl_adaptive; sys.exit(' '.join(m for m in {HEAVY!r} if m in sys.modules) or 0)"
    subprocess.run([sys.executable, "-c", light], check=True)
    print("ok  import verl_adaptive is light")
    assert files("verl_adaptive").joinpath("py.typed").is_file()
    assert {"greso", "aero", "cero", "pilot_commit", "solo", "grpo", "dapo"} <= set(
        json.loads(call("parts", "--json"))["presets"]
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data, store = make_store(folder), str(folder / "adaptive")
        found = json.loads(call("stats", store, "--json"))
        assert (found["prompts"], found["steps"], found["rollouts"]) == (32, 3, 768), found
        call("stats", store)
        call("export", store, str(folder / "prompts.csv"))
        call("report", store, "-o", str(folder / "report.html"), "--data", str(data))
        assert "smoke/test" in (folder / "report.html").read_text(encoding="utf-8")
        kept = str(folder / "kept.parquet")
        call("export", store, kept, "--data", str(data), "--where", "pass_rate < 0.9")
        call("compare", store, store)
        assert "does not exist" in call("stats", str(folder / "nowhere"), status=1)
    if not args.with_verl:
        assert "not installed in this environment" in json.dumps(json.loads(doctor())["checks"])
    from hydra import compose, initialize_config_dir

    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary, "main.yaml").write_text(
            "trainer: {v1: {trainer_mode: sync, sampler: {custom_sampler: {path: null, name: null}}}}"
        )
        with initialize_config_dir(temporary, version_base=None):
            assert compose("main", overrides=["+adaptive=greso"]).adaptive.sampler.name == "greso"
    print("ok  Hydra finds +adaptive=greso")


def doctor() -> str:
    """What ``doctor`` says where verl is missing: status 1, findings as JSON."""
    program = Path(sys.executable).with_name("verl-adaptive")
    done = subprocess.run([str(program), "doctor", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stderr, done.stderr
    print("ok  verl-adaptive doctor says that verl is missing")
    return done.stdout


if __name__ == "__main__":
    main()
