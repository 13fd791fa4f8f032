"""What the training benchmarks share: names of cells, where one ran, files that are written whole, intervals over seeds."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from verl_adaptive.significance import t95
from verl_adaptive.stats.atomic import write_file


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes are answered in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


class GridParser(Parser):
    """The command line of a training benchmark: which cells to run, or to run again.

    Args:
        prog, description: as of argparse.
        presets, variants: all names.
        arms: presets that run if none is named; ``variant``: the variant that does; ``lrs`` and ``seeds`` likewise.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        *,
        presets: Iterable[str],
        variants: Iterable[str],
        arms: Iterable[str],
        variant: str,
        lrs: Sequence[float],
        seeds: int,
    ) -> None:
        super().__init__(prog=prog, description=description)
        self._names = {"variants": list(variants), "presets": list(presets)}  # in the order of a key
        shown = "separated by commas or semicolons, of: "
        self.add_argument("--presets", default=";".join(arms), help=shown + "; ".join(self._names["presets"]))
        self.add_argument(
            "--variants", default=variant, help=f"{shown}{'; '.join(self._names['variants'])} (%(default)s)"
        )
        rates = ",".join(f"{lr:g}" for lr in lrs)
        self.add_argument("--lrs", default=rates, help="learning rates, separated by commas (%(default)s)")
        self.add_argument("--seeds", type=int, default=seeds, help="seeds 0 to this less one (%(default)s)")
        self.add_argument("--cell", action="append", default=[], metavar="ID", help="run this cell again")
        self.add_argument("--check", action="store_true", help="with --cell: compare with the results, do not store")
        self.add_argument("--fresh", action="store_true", help="run again what the results hold")
        self.add_argument("--list", action="store_true", help="print the cells that would run, and stop")

    def cells(self, options: argparse.Namespace) -> list[Key]:
        """What is asked for, the most wanted first: all policies at one rate and seed, then further seeds, then further rates."""
        if options.seeds < 1:
            self.error("--seeds must be 1 or greater")
        if options.check and not options.cell:
            self.error("--check needs --cell ID")
        try:
            rates = [float(lr) for lr in options.lrs.split(",")]
            again = [parse_id(text) for text in options.cell]
        except ValueError as error:
            self.error(str(error))
        chosen = {}
        for place, (what, known) in enumerate(self._names.items()):
            chosen[what] = [name.strip() for name in re.split("[;,]", getattr(options, what)) if name.strip()]
            for name in (*chosen[what], *(key[place] for key in again)):
                if name not in known:
                    self.error(f"no {what[:-1]} {name!r}; there are {', '.join(known)}")
        return again or [
            (variant, preset, lr, seed)
            for variant in chosen["variants"]
            for lr in rates
            for seed in range(options.seeds)
            for preset in chosen["presets"]
        ]


Key = tuple[str, str, float, int]  # variant, preset, learning rate, seed


def cell_id(variant: str, preset: str, lr: float, seed: int) -> str:
    """How a cell is named on the command line."""
    return f"{variant}/{preset}/lr={lr:g}/seed={seed}"


def parse_id(text: str) -> Key:
    """The cell that a name means, whose variant and preset need not exist.

    Raises:
        ValueError: it is not a cell's name.
    """
    parts = text.split("/")
    if len(parts) != 4 or not parts[2].startswith("lr=") or not parts[3].startswith("seed="):
        raise ValueError(f"{text!r} is no cell; write VARIANT/PRESET/lr=RATE/seed=NUMBER, with one of --list")
    try:
        return parts[0], parts[1], float(parts[2][3:]), int(parts[3][5:])
    except ValueError:
        raise ValueError(f"{text!r} is no cell: RATE must be a number and the seed a whole number") from None


def check_again(key: Key, now: float, known: Mapping[Key, float]) -> str:
    """Whether a cell that ran again lies where its seeds put it, in words.

    Args:
        now: its held-out accuracy.
        known: those in the results.

    Raises:
        SystemExit: it does not, or there is nothing to compare with.
    """
    name = cell_id(*key)
    seeds = [value for other, value in known.items() if other[:3] == key[:3]]
    if not seeds:
        raise SystemExit(f"{name}: the results hold no seed of this cell to check against")
    centre, half = prediction(seeds)
    text = f"{name}: held-out {now:.4f} at the end"
    text += f", {known[key]:.4f} in the results" if key in known else ""
    if len(seeds) == 1:
        return f"{text}; one seed gives no interval"
    text += f"; 95 % of further runs lie in {centre - half:.4f} to {centre + half:.4f} ({len(seeds)} seeds)"
    if abs(now - centre) > half:
        raise SystemExit(f"{text}: OUTSIDE")
    return f"{text}: inside"


def run_script(main: Callable[[], None]) -> NoReturn:
    """Run a script's command line; being interrupted, or not being read to the end, ends it without a traceback."""
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # `… --list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def run_all(call: Callable[[Any], Any], keys: Sequence[Any], jobs: int) -> Iterator[Any]:
    """What a call gives of each key, as it comes: one after the other, or in so many processes."""
    if jobs == 1:
        yield from map(call, keys)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(call, key) for key in keys]):
            yield future.result()


def prediction(values: Sequence[float]) -> tuple[float, float]:
    """Centre and half width of the 95 % interval for one further run; infinite for one value."""
    if len(values) < 2:
        return float(np.mean(values)), float("inf")
    return float(np.mean(values)), float(t95(len(values)) * np.std(values, ddof=1) * np.sqrt(1 + 1 / len(values)))


def thinned(rates: np.ndarray, size: int, flat: int) -> np.ndarray:
    """A pool in which few prompts are informative: those answered most surely, right or wrong, and some of the rest.

    Args:
        rates: exact pass rates at the start, ``(M,)``.
        size: prompts of the pool.
        flat: how many of them are those with the least p (1 − p); the others are spread evenly over what is left.

    Returns:
        Positions in ``rates``, int64 ``(size,)``, in order.
    """
    order = np.argsort(rates * (1 - rates), kind="stable")
    rest = order[flat:]
    spread = np.linspace(0, len(rest) - 1, size - flat).round().astype(np.int64)
    return np.sort(np.concatenate([order[:flat], rest[spread]]))


def load_average() -> float:
    """Processes that wanted a core over the last minute."""
    return round(os.getloadavg()[0], 2)


def versions(*packages: str) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # vllm goes by two names
            continue
    return found


def machine() -> dict[str, Any]:
    """What the numbers were measured on: processor, cores, memory, system, Python."""
    cpu = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (OSError, ValueError, AttributeError):  # neither Linux nor POSIX
        memory = float("nan")
    return {
        "cpu": cpu or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": None if np.isnan(memory) else round(memory, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def write_whole(path: Path, text: str) -> None:
    """Write a file; the old one stays until the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda file: file.write(text.encode()))


def key_of(row: Mapping[str, Any]) -> Key:
    """A cell's key."""
    return row["variant"], row["preset"], row["lr"], row["seed"]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The cells of a grid, one line of JSON each; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def put_row(path: Path, row: dict[str, Any]) -> None:
    """Put a cell among a grid's lines, in order, in place of the one of the same name; several processes may do so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = [*(old for old in read_rows(path) if key_of(old) != key_of(row)), row]
        write_whole(path, "".join(json.dumps(each) + "\n" for each in sorted(rows, key=key_of)))
    finally:
        os.close(folder)


def to_json(data: dict[str, Any], rows: str) -> str:
    """JSON with one line for each entry of ``data[rows]``, so that a version control's differences can be read."""
    head = json.dumps({k: v for k, v in data.items() if k != rows}, indent=1)[:-2]
    listed = ",\n".join(json.dumps(row) for row in data[rows])
    return f'{head},\n "{rows}": [\n{listed}\n]\n}}\n'
