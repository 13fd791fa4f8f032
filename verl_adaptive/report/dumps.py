"""What verl wrote down of the rollouts (``trainer.rollout_data_dir``): the commonest wrong answer to a prompt.

verl writes the rollouts that trained, one JSON object a line (``input``, ``output``, ``gts``, ``score``), a file a step.
They carry no identity of the prompt, so a line belongs to a prompt if its expected answer is the prompt's and its input
holds the prompt's text; of several such prompts, to the one with the longest text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl_adaptive.config import at_least

__all__ = ["Said", "answer_in", "said_of"]

#: Bytes that are read at most, the newest steps first.
MOST = 512 * 2**20

_MARKED = (
    re.compile(r"<answer>(.*?)</answer>", re.S),
    re.compile(r"####\s*([^\n]+)"),
    re.compile(r"(?:final answer|the answer is|answer:)\s*[:=]?\s*([^\n]+)", re.I),
)


@dataclass
class Said:
    """What rollouts of a prompt answered.

    Attributes:
        wrong: answer → times, of rollouts that failed.
        rollouts: found in all.
    """

    wrong: Counter[str] = field(default_factory=Counter)
    rollouts: int = 0

    @property
    def commonest(self) -> tuple[str, float] | None:
        """The commonest wrong answer and its share of the rollouts found; None if there is none."""
        if not self.wrong:
            return None
        answer, times = min(self.wrong.items(), key=lambda item: (-item[1], item[0]))
        return answer, times / self.rollouts


def answer_in(output: str, limit: int = 80) -> str:
    """The answer that a rollout gives: what is boxed or marked last, else its last line."""
    at = output.rfind("\\boxed{")
    if at >= 0:
        depth, start = 0, at + len("\\boxed")
        for i in range(start, min(len(output), start + 4 * limit)):
            depth += (output[i] == "{") - (output[i] == "}")
            if not depth:
                return " ".join(output[start + 1 : i].split())[:limit]
    tail = output[-4000:]
    for pattern in _MARKED:
        found = pattern.findall(tail)
        if found:
            return " ".join(found[-1].split()).rstrip(".")[:limit]
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[-1][-limit:] if lines else "(nothing)"


def said_of(folder: str, prompts: Mapping[str, tuple[str, str]], *, threshold: float = 0.5) -> dict[str, Said]:
    """What the rollouts of some prompts answered.

    Args:
        folder: ``trainer.rollout_data_dir``.
        prompts: key → (text, expected answer); a few hundred.
        threshold: a rollout failed if its score is below.

    Returns:
        By key; prompts of which nothing was written down are left out. Lines that are no rollouts are passed over:
        the newest file may be being written.
    """
    by_answer: dict[str, list[tuple[str, str]]] = {}
    for key, (text, answer) in prompts.items():
        if text.strip():
            by_answer.setdefault(answer, []).append((key, text.strip()))
    for candidates in by_answer.values():
        candidates.sort(key=lambda one: -len(one[1]))  # a text that holds another one is the better match
    files = [path for path in Path(folder).glob("*.jsonl") if path.stem.isdigit()]
    out: dict[str, Said] = {}
    left = MOST
    for path in sorted(files, key=lambda p: -int(p.stem)):
        left -= path.stat().st_size
        if left < 0 and out:
            break
        with path.open("rb") as file:
            for line in file:
                _take(line, by_answer, threshold, out)
    return out


def _take(line: bytes, by_answer: Mapping[str, list[tuple[str, str]]], threshold: float, out: dict[str, Said]) -> None:
    try:
        row = json.loads(line)
        given, output, score = row["input"], row["output"], float(row["score"])
        candidates = by_answer.get(str(row.get("gts")), ())
    except (ValueError, TypeError, KeyError, AttributeError):
        return
    for key, text in candidates:
        if text in given:
            said = out.setdefault(key, Said())
            said.rollouts += 1
            if not at_least(score, threshold):
                said.wrong[answer_in(str(output))] += 1
            return
