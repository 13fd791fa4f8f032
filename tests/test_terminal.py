"""README's animated terminal: the script that records it, and the file that is shown."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

from verl_adaptive.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import terminal  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
OUTPUT = """\
\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m Creating file logger
\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m verl-adaptive 0.2.0 on AdaptiveSync, verl 0.9.1
\x1b[36m(WorkerDict pid=8)\x1b[0m   indented, but not ours
\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m   policy   solo: sampler=spread
\x1b[36m(WorkerDict pid=8)\x1b[0m   also indented, but not ours
\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m step:1 - actor/entropy:0.4
\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m INFO:2026:verl_adaptive.integration.step_metrics: step 1/16: 128 prompts
"""


def rows(svg: str) -> list[str]:
    """The text of each row, top to bottom."""
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text") if "y" in text.attrib]


def test_of_a_training_the_banner_and_the_steps_are_kept() -> None:
    assert list(terminal.ours(OUTPUT)) == [
        "verl-adaptive 0.2.0 on AdaptiveSync, verl 0.9.1",
        "  policy   solo: sampler=spread",
        "step 1/16: 128 prompts",
    ]


def test_long_output_scrolls_to_its_last_row() -> None:
    lines = ["$ a <b> & c", *(f"line {i}" for i in range(terminal.ROWS)), "x " * terminal.COLUMNS]
    svg = terminal.drawn(lines)
    drawn = rows(svg)[1:]
    assert drawn[: len(lines) - 1] == lines[:-1]
    assert "".join(drawn[len(lines) - 1 :]).count("x") == terminal.COLUMNS
    assert max(map(len, drawn)) <= terminal.COLUMNS
    ends = int(re.search(r" 100% \{ transform: translateY\(-(\d+)px\)", svg)[1])
    assert ends == terminal.HEIGHT * (len(drawn) - terminal.ROWS)


def test_what_fits_does_not_scroll() -> None:
    assert set(re.findall(r"translateY\(-?(\d+)px\)", terminal.drawn(["$ a", "b"]))) == {"0"}


def test_the_terminal_that_is_shown_is_of_this_version() -> None:
    shown = ROOT / "docs" / "terminal.svg"
    assert shown.stat().st_size < 500_000
    text = rows(shown.read_text())
    version = re.search(r"^version = (.*)$", (ROOT / "setup.cfg").read_text(), flags=re.M)[1]
    assert f"verl-adaptive {version} on AdaptiveSync, verl 0.9.1" in text
    commands = [row.split() for row in text if row.startswith(terminal.PROMPT)]
    assert {words[2] for words in commands if words[1] == "verl-adaptive"} <= set(COMMANDS)
    assert [terminal.kind(row) for row in text].count("step") == 16
    assert not [row for row in text if re.search(r"(?<!\w)/(?:\w+/)+", row)], "a path of the machine"
