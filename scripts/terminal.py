#!/usr/bin/env python3
"""Records README's animated terminal: the commands of a first run, and what they print, as an SVG file.

  python scripts/terminal.py WORK [-o docs/terminal.svg]

WORK is what examples/quickstart_cpu.sh made (outputs/quickstart_cpu): its model and data are used, and its command line
for `solo`, seed 21. Run it in the environment that the quickstart made. The commands are run for real, in a folder of
their own; waiting is left out, and so are the lines that verl, Ray and vLLM print. Where a viewer wants no motion, the
first rows stand still.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

ROWS, COLUMNS = 26, 116
#: Pixels of a character and of a row; seconds that a command is typed in, that each kind of line takes.
WIDTH, HEIGHT, TYPING, LINE, STEP, END = 7.3, 17, 1.2, 0.09, 0.5, 2.5
OVERRIDES = "<your overrides>"
PROMPT = "$ "
STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d5d9e0; white-space: pre; }
.command { fill: #ffffff; font-weight: bold; } .step { fill: #8fd6a0; } .title { fill: #8b94a3; font-size: 11px; }
.line { animation: appear 0.01s both; } .lines { animation: scroll %(total).1fs both step-end; }
@keyframes appear { from { opacity: 0; } }
@keyframes scroll { %(stops)s }
@media (prefers-reduced-motion: reduce) { .line, .lines { animation: none; } }
"""


def kind(line: str) -> str:
    """``command``, ``step`` or ``output``."""
    return "command" if line.startswith(PROMPT) else "step" if re.match(r"step \d+/", line) else "output"


def rows_of(lines: Sequence[str]) -> Iterator[tuple[float, str, str]]:
    """Second, kind and text of each row; a line that is too wide goes on in the next, as in a terminal."""
    seconds = 0.5
    for line in lines:
        seconds += {"command": TYPING, "step": STEP, "output": LINE}[kind(line)]
        for row in textwrap.wrap(line, COLUMNS, replace_whitespace=False) or [""]:
            yield seconds, kind(line), row


def drawn(lines: Sequence[str]) -> str:
    """The animation as an SVG document."""
    rows = list(rows_of(lines))
    total = rows[-1][0] + END
    stops = {0.0: 0} | {at / total: HEIGHT * (i + 1 - ROWS) for i, (at, *_) in enumerate(rows) if i >= ROWS}
    style = STYLE % {
        "total": total,
        "stops": " ".join(f"{100 * at:.3f}% {{ transform: translateY({-up}px); }}" for at, up in stops.items())
        + f" 100% {{ transform: translateY({-max(stops.values())}px); }}",
    }
    texts = "\n".join(
        f'<text class="line {what}" y="{HEIGHT * (i + 1)}" style="animation-delay:{at:.2f}s">{escape(text)}</text>'
        for i, (at, what, text) in enumerate(rows)
    )
    wide, high = round(COLUMNS * WIDTH) + 24, HEIGHT * ROWS + 46
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">
<style>{style}</style>
<rect width="{wide}" height="{high}" rx="8" fill="#161b22"/>
<text class="title" x="12" y="18">verl and vLLM on two CPU cores; waiting and verl's own lines are left out</text>
<svg x="12" y="28" width="{wide - 24}" height="{HEIGHT * ROWS + 6}"><g class="lines">
{texts}
</g></svg>
</svg>
"""


def ours(output: str) -> Iterator[str]:
    """The plugin's lines of a training's output: what it says at the start, and a line a step."""
    start = False
    for line in output.splitlines():
        line = re.sub(r"^\(TaskRunner\w* pid=\d+\) ", "", re.sub(r"\x1b\[[0-9;]*m", "", line))
        if re.match(r"\(\w+ pid=\d+", line):  # another process's, maybe between two lines of the banner
            continue
        step = re.search(r"verl_adaptive\S* (step \d+/\d+: .*)", line)
        start = line.startswith("verl-adaptive ") or (start and line.startswith("  "))
        if step or start:
            yield step[1] if step else line


def recorded(work: Path, folder: Path) -> Iterator[str]:
    """Run the commands in ``folder``, and yield them with what they print."""
    runs = json.loads((work / "runs" / "plan.json").read_text())
    words = next(run["words"] for run in runs if run["name"] == "solo, seed 21")
    checkpoints = "checkpoints/quickstart/solo"
    own = {
        "trainer.experiment_name": "solo",
        "trainer.default_local_dir": checkpoints,
        "hydra.run.dir": "hydra",
        "trainer.save_freq": "16",
    }
    words = [f"{key}={own.get(key, value)}" for key, value in (word.split("=", 1) for word in words)]
    environment = os.environ | {
        "VERL_PLATFORM": "cpu",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": str(COLUMNS),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
    }
    preset, words = words[0], words[1:]
    for shown, command in (
        (f"verl-adaptive doctor {OVERRIDES} {preset}", ["verl-adaptive", "doctor", *words, preset]),
        (
            f"python -m verl.trainer.main_ppo {OVERRIDES} {preset}",
            ["python", "-m", "verl.trainer.main_ppo", *words, preset],
        ),
        (f"verl-adaptive stats {checkpoints}", ["verl-adaptive", "stats", checkpoints]),
        (
            f"verl-adaptive report {checkpoints} -o report.html",
            ["verl-adaptive", "report", checkpoints, "-o", "report.html"],
        ),
    ):
        print(PROMPT + shown, flush=True)
        done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
        if done.returncode:
            raise SystemExit(f"terminal: status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        yield PROMPT + shown
        printed = f"{done.stdout.rstrip()}\n{done.stderr.rstrip()}".strip("\n")
        lines = ours(printed) if "main_ppo" in shown else printed.splitlines()
        yield from (line.replace(f"{folder}/", "").replace(sys.prefix, ".venv") for line in lines)
        yield ""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="the quickstart's folder")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/terminal.svg"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = list(recorded(options.work.resolve(), Path(folder).resolve()))
    options.output.write_text(drawn(lines))
    print(f"{options.output}: {options.output.stat().st_size / 1000:.0f} kB, {len(lines)} lines")


if __name__ == "__main__":
    main()
