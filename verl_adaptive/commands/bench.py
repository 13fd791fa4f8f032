"""Compare methods at equal budgets: a tiny model in this process, or real verl without a GPU.

examples:
  verl-adaptive bench torch --presets "grpo;greso;solo" --seeds 5     minutes; needs torch
  verl-adaptive bench pretrained --list                               days; a pretrained model on the CPU pipeline
  verl-adaptive bench report                                          tables and plots again, from the results

What follows the benchmark's name is the benchmark's own; --help after it tells more. torch and pretrained share --presets,
--variants, --lrs, --seeds, --cell ID, --check, --fresh and --list; cells that the results hold are not run again. They run
from a checkout: their results belong beside the code that made them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from verl_adaptive.errors import AdaptiveError

#: Benchmark → its module in ``benchmarks/``, and the modules that it cannot do without.
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch": ("train_torch", ("torch",)),
    "pretrained": ("pretrained", ("torch", "verl", "vllm", "reasoning_gym", "pandas", "gguf")),
    "report": ("report", ("matplotlib",)),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", metavar="BENCHMARK", choices=MODULES, help=", ".join(MODULES))
    parser.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help="the benchmark's own options")


def run(args: argparse.Namespace) -> int:
    module, needs = MODULES[args.which]
    root = _checkout()
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise AdaptiveError(
            f"bench {args.which} needs {', '.join(missing)}, not installed here; in the checkout: "
            "bash scripts/install.sh .venv && . .venv/bin/activate"
        )
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH")) if p)
    words = [sys.executable, "-m", f"benchmarks.{module}", *args.words]
    return subprocess.run(words, env=os.environ | {"PYTHONPATH": path}).returncode


def _checkout() -> Path:
    """The checkout that this package is installed from, or that one stands in; AdaptiveError if there is neither."""
    for place in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (place / "benchmarks" / "train_torch.py").is_file():
            return place
    raise AdaptiveError(
        "bench needs the source checkout (an installed package has no benchmarks/): get the repository of verl-adaptive and "
        "run this in its root; verl-adaptive simulate works everywhere"
    )
