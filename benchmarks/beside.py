"""The engine's own time for a step, beside an earlier version's: the same work, one process after the other, in turn.

    python -m benchmarks.beside                    # 0.1.0 and this checkout; 8,192 rollouts a step, a million prompts

A step is ``begin``, ``receive`` and ``finish`` of the package's engine; prompts, rewards and the table are made in memory,
so that nothing but decisions is timed, in seconds of processor time. *rounds* hands a round's results over together, as
0.1.0 must have them. *in order* hands this version's over in twenty looks, as they come in training. Reported: the ratio
to the earlier version's median step, pair by pair.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "beside.json"
#: 0.1.0.
EARLIER = "23eb13c"
PRESETS = ("grpo", "dapo", "greso", "aero", "cero", "pilot_commit", "full")
BATCH, N, PROMPTS, LOOKS = 512, 16, 1_000_000, 20
WARM_UP, MEASURED = 2, 4


class Source:
    """Prompts of a data set in shuffled order, without end."""

    def __init__(self, size: int) -> None:
        self.order, self.at, self.size = np.random.default_rng(1).permutation(size), 0, size

    def take(self, count: int) -> np.ndarray:
        """The next positions."""
        found = self.order[(self.at + np.arange(count)) % len(self.order)]
        self.at += count
        return found


def answers(requests: Any, rate: np.ndarray, rng: np.random.Generator) -> Any:
    """What comes back: a group a request."""
    from verl_adaptive.groups import Groups

    n, count = requests.n, len(requests)
    reward = (rng.random(int(n.sum())) < np.repeat(rate[requests.row], n)).astype(np.float64)
    none = np.zeros(count, dtype=np.int32)
    return Groups(
        ticket=requests.ticket,
        row=requests.row,
        index=requests.index,
        failed=none.astype(bool),
        lag=none,
        offsets=np.concatenate([[0], np.cumsum(n)]).astype(np.int64),
        reward=reward,
        signal=reward,
        success=reward,
        tokens=np.full(len(reward), 1000, dtype=np.int64),
        stage=np.repeat(requests.stage, n).astype(np.int16),
        lost=none,
    )


def probe(preset: str, looks: int) -> list[float]:
    """Seconds of the measured steps; in whichever version's process this runs."""
    from verl_adaptive.config import RunFacts
    from verl_adaptive.groups import Groups
    from verl_adaptive.policy import build_policy
    from verl_adaptive.simulate.presets import compose_preset
    from verl_adaptive.stats import KEY_DTYPE, StatsTable

    words = preset.split()
    if preset == "pilot_commit":  # the same work in both versions: its default form is another one since
        words.append("adaptive.allocator.form=on_policy")
    config = compose_preset(words if looks > 1 or EARLIER_HERE else [*words, "adaptive.rounds=true"])
    facts = RunFacts(batch=BATCH, n=N, steps=1000, prompts=PROMPTS)
    keys = np.zeros(PROMPTS, dtype=KEY_DTYPE)
    keys["lo"] = np.arange(PROMPTS)
    table = StatsTable()
    rows = table.rows_for(keys)
    rng = np.random.default_rng(0)
    kind = rng.random(PROMPTS)  # hopeless, solved, and between
    rate = np.where(kind < 0.3, 0.0, np.where(kind < 0.5, 1.0, rng.random(PROMPTS)))
    if EARLIER_HERE:
        from verl_adaptive.engine import Engine as make
    else:
        from verl_adaptive.engine import make_engine as make  # type: ignore[assignment]
    engine: Any = make(build_policy(config), table, config, facts, rows, Source(PROMPTS))
    spent = []
    for step in range(1, 1 + WARM_UP + MEASURED):
        seconds, waiting, look = 0.0, {}, 0
        began = time.process_time()
        requests = engine.begin(step)
        seconds += time.process_time() - began
        while True:
            if requests is not None and len(requests):
                groups = answers(requests, rate, rng)
                for i in range(min(looks, len(groups))):
                    waiting.setdefault(look + i, []).append(groups.select(np.arange(i, len(groups), looks)))
            if not waiting or (not EARLIER_HERE and engine.settled):
                break
            parts = waiting.pop(look, [])
            look += 1
            if not parts:
                requests = None
                continue
            back = Groups.concat(parts).sorted() if len(parts) > 1 else parts[0]
            began = time.process_time()
            requests = engine.receive(back)
            seconds += time.process_time() - began
        began = time.process_time()
        engine.finish()
        spent.append(seconds + time.process_time() - began)
    return spent[WARM_UP:]


#: Whether this process has the earlier version's package.
EARLIER_HERE = os.environ.get("BESIDE_EARLIER") == "1"


def measure(root: Path, preset: str, looks: int, earlier: bool) -> float:
    """Median seconds of a step, in a process of its own."""
    from benchmarks.presets import spelled

    named = preset if earlier else spelled(preset)
    environment = {**os.environ, "PYTHONPATH": str(root), "BESIDE_EARLIER": str(int(earlier)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--probe", named, "--looks", str(looks)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{preset}, {'earlier' if earlier else 'this'} version:\n{done.stderr[-3000:]}")
    return float(np.median(json.loads(done.stdout.splitlines()[-1])))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--earlier", default=EARLIER, help="commit of the earlier version (default: %(default)s)")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--looks", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        print(json.dumps(probe(options.probe, options.looks)))
        return
    from benchmarks.cells import load_average, machine, to_json, versions, write_whole

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", options.earlier], cwd=HERE.parent, capture_output=True, check=True)
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        for preset in options.presets:
            found: dict[str, list[float]] = {"earlier": [], "rounds": [], "in order": []}
            for repeat in range(options.repeats):
                for name in list(found) if repeat % 2 == 0 else reversed(found):
                    root = Path(folder) if name == "earlier" else HERE.parent
                    looks = LOOKS if name == "in order" else 1
                    found[name].append(round(measure(root, preset, looks, name == "earlier"), 5))
            rows.append({"preset": preset, **found})
            print(preset, found, flush=True)
            about = {
                "command": " ".join(["python -m benchmarks.beside", *sys.argv[1:]]),
                "earlier": options.earlier,
                "settings": {"batch": BATCH, "n": N, "prompts": PROMPTS, "looks": LOOKS},
                "machine": machine(),
                "load": load_average(),
                "versions": versions("numpy", "verl-adaptive"),
            }
            write_whole(options.out, to_json({**about, "rows": rows}, "rows"))


if __name__ == "__main__":
    main()
