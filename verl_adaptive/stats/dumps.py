"""What verl wrote down of the rollouts (``trainer.rollout_data_dir``): a run's course without any journal, and what was answered.

verl writes the rollouts that trained, one JSON object a line (``input``, ``output``, ``gts``, ``score``), a file a step. They
carry no identity of a data set's prompt: within a folder of them a prompt is its input and expected answer; beside a data set
a line belongs to a prompt if its expected answer is the prompt's and its input holds the prompt's text; of several such
prompts, to the one with the longest text.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl_adaptive.groups import SUCCESS, at_least
from verl_adaptive.stats.dataset import Row, Said, expected
from verl_adaptive.stats.files import StoreError, json_lines
from verl_adaptive.stats.journal import numbers
from verl_adaptive.stats.keys import prompt_key
from verl_adaptive.stats.reader import OBSERVATIONS, JournalReader

#: Bytes that are read at most, the newest steps first, beyond the newest file.
MOST = 512 * 2**20

_MARKED = (
    re.compile(r"<answer>(.*?)</answer>", re.S),
    re.compile(r"####\s*([^\n]+)"),
    re.compile(r"(?:final answer|the answer is|answer:)\s*[:=]?\s*([^\n]+)", re.I),
)


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


def dump_files(folder: Path) -> list[Path]:
    """The files of a folder of verl's rollouts, by step; a file of them is one alone."""
    if folder.is_file():
        with folder.open("rb") as file:
            first = file.readline() if folder.suffix == ".jsonl" else b""
        return [folder] if all(name in first for name in (b'"input"', b'"output"', b'"score"')) else []
    return sorted(
        (p for p in folder.glob("*.jsonl") if re.fullmatch(r"\d+", p.stem) and p.is_file()), key=lambda p: int(p.stem)
    )


def _rollouts(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rollouts of a file, each with where its line is; a last line that is not whole is left out.

    A rollout of several outputs has a line each, with ``uid`` "<prompt>_<rollout>_<output>". Only the last one has the reward;
    only the first one's input is the prompt alone. What verl fills a batch up with, "pad<32 hex digits>_…", nobody generated.
    """
    last: dict[Any, tuple[str, dict[str, Any]]] = {}
    for number, row in json_lines(path, growing=True):
        where = f"{path}, line {number}"
        if re.match(r"pad[0-9a-f]{32}_", str(row.get("uid"))):
            continue
        name = re.sub(r"_\d+$", "", str(row["uid"])) if row.get("uid") else where
        _, first = last.setdefault((row.get("step"), name), (where, row))
        last[row.get("step"), name] = where, row | {n: first[n] for n in first.keys() & {"input"}}
    yield from last.values()


class DumpReader(JournalReader):
    """verl's rollouts, read as a journal is: a group is all rollouts of a prompt in a step. All of them trained.

    Args:
        folder: ``trainer.rollout_data_dir``.
        success: what scores say of success, in [0, 1].
        most: bytes that are read at most, the newest steps first, beyond the newest file.

    Attributes:
        rows: by key in 32 hex digits: input and expected answer; row, text and data source where a data set says them.
        said: by the same: what rollouts answered.

    Raises:
        StoreError: a line is no rollout; with its number.
    """

    def __init__(self, folder: str, success: Callable[[np.ndarray], np.ndarray], *, most: float = math.inf) -> None:
        self.folder = Path(folder)
        self.attempts = [{"attempt": 0, "parent": None, "after": 0, "run": self.folder.name}]
        self.rows: dict[str, Row] = {}
        self.said: dict[str, Said] = {}
        self._written: dict[int, float] = {}
        groups: dict[tuple[int, bytes], list[tuple[float, str]]] = {}  # by step and key: scores and answers
        lost: Counter[tuple[int, bytes]] = Counter()  # as training counts them: a score that is no number is none
        files = dump_files(self.folder)
        sizes = np.cumsum([path.stat().st_size for path in files[::-1]])
        for path in files[-max(1, int((sizes <= most).sum())) :]:
            for where, row in _rollouts(path):
                key, step, score = _rollout(row, int(path.stem) if path.stem.isdigit() else 0, where)
                self.rows.setdefault(key.hex(), Row(None, str(row["input"]), expected(row.get("gts"))))
                self._written[step] = path.stat().st_mtime
                mine = groups.setdefault((step, key), [])
                if math.isfinite(score):
                    mine.append((score, answer_in(str(row.get("output", "")))))
                else:
                    lost[step, key] += 1
        rows = []
        for place, (step, key) in enumerate(sorted(groups, key=lambda group: group[0])):
            values = np.array([score for score, _ in groups[step, key]])
            answers, right = [answer for _, answer in groups[step, key]], success(values)
            said = self.said.setdefault(key.hex(), Said())
            said.rollouts += len(values)
            said.wrong.update(answer for answer, won in zip(answers, right, strict=True) if won < SUCCESS)
            row = {"attempt": 0, "step": step, "submission": place, "key": key, "source": ""}
            row |= {"n": len(values), "successes": right.sum()}
            for name in ("signal", "reward"):
                row |= {f"{name}_sum": values.sum(), f"{name}_sqsum": (values * values).sum()}
            row |= {"signal_min": min(values, default=0.0), "signal_max": max(values, default=0.0)}
            row |= {
                "outcome": "trained" if len(values) else "failed",
                "failed": not len(values),
                "tokens": None,
                "lag": None,
            }
            row |= {"lost": lost[step, key], "clipped": None}
            rows.append(row)
        self._table = pa.Table.from_pylist(rows, schema=OBSERVATIONS)

    def beside(self, known: Mapping[str, Row]) -> None:
        """Take the prompts of a data set, with their keys, for the rollouts that are theirs."""
        by_answer: dict[str, list[tuple[str, str]]] = {}
        for key, row in known.items():
            if row.text.strip():
                by_answer.setdefault(row.answer, []).append((row.text.strip(), key))
        for candidates in by_answer.values():
            candidates.sort(key=lambda one: -len(one[0]))  # a text that holds another one is the better match
        theirs = {key: by_answer.get(row.answer, ()) for key, row in self.rows.items()}
        found = {
            key: next((other for text, other in theirs[key] if text in row.text), key) for key, row in self.rows.items()
        }
        own, said = self.rows, self.said
        self.rows = {key: known.get(key) or own[before] for before, key in found.items()}
        self.said = {}
        for before, told in said.items():
            one = self.said.setdefault(found[before], Said())
            one.rollouts += told.rollouts
            one.wrong.update(told.wrong)
        rows = self._table.to_pylist()
        for row in rows:
            key = found[row["key"].hex()]
            row |= {"key": bytes.fromhex(key), "source": self.rows[key].source}
        self._table = pa.Table.from_pylist(rows, schema=OBSERVATIONS)

    def lines(self) -> list[dict[str, Any]]:
        """A line a step, as a journal has them."""
        step, n, lost = (self._table.column(name).to_numpy() for name in ("step", "n", "lost"))
        steps, first, groups = np.unique(step, return_index=True, return_counts=True)
        trained, lost = (np.add.reduceat(counts, first, dtype=np.int64) for counts in (n, lost))
        accounts = np.stack([trained, lost, trained.cumsum(), lost.cumsum()], axis=1).tolist()
        out = []
        for at, size, counts in zip(steps.tolist(), groups.tolist(), accounts, strict=True):
            ledger = {
                scope: {"rollouts": {"generated": k + gone, "trained": k, "dropped": {"lost": gone}}}
                for scope, k, gone in (("step", *counts[:2]), ("run", *counts[2:]))
            }
            line = {"attempt": 0, "step": at, "wall_time": self._written[at], "groups": size}
            out.append({**line, "ledger": json.dumps(ledger), "scalars": "{}"})
        return out

    def newest(self, count: int = 2) -> list[dict[str, Any]]:
        """The last of :meth:`lines`."""
        return self.lines()[-count:]

    def gaps(self) -> list[tuple[int, int, str]]:
        """Nothing is known of steps that are not there."""
        return []

    def validations(self) -> list[dict[str, Any]]:
        """Of verl's file logger, where its file lies in the folder, too; it does not say of how many prompts."""
        out: dict[int, dict[str, Any]] = {}
        for path in sorted(path for path in self.folder.glob("*.jsonl") if not path.stem.isdigit()):
            for _, row in json_lines(path, growing=True):
                step, data = row.get("step"), row.get("data")
                if not isinstance(data, dict) or type(step) is not int:
                    continue
                values = numbers({name: value for name, value in data.items() if name.startswith("val-")})
                if values:
                    line = {"step": step, "wall_time": path.stat().st_mtime, "generated": None}
                    out.setdefault(step, {**line, "metrics": values, "prompts": {}})
        return [out[step] for step in sorted(out)]

    def observations(self, first_step: float = 0, last_step: float = math.inf) -> Iterator[pa.Table]:
        """One page of all groups, in order of steps; bounds are included."""
        step = self._table.column("step").to_numpy()
        yield self._table.filter(pa.array((step >= first_step) & (step <= last_step)))

    def dataset(self) -> None:
        """Prompts that never trained are not known."""
        return


def _rollout(row: Mapping[str, Any], step: int, where: str) -> tuple[bytes, int, float]:
    """Key, step and score of a line; StoreError if it is no rollout."""
    if missing := {"input", "score"} - set(row):
        raise StoreError(f"{where}: no {' and no '.join(sorted(missing))}; is it a dump of verl's rollouts?")
    score, step = row["score"], row.get("step", step)
    if type(score) not in (int, float):
        raise StoreError(f"{where}: score={score!r} is not a number")
    if type(step) is not int or not 0 <= step < 2**31:
        raise StoreError(f"{where}: step={step!r} is not a whole number")
    return prompt_key(None, row["input"], row.get("gts")), step, float(score)


def said_of(folder: str, prompts: Mapping[str, Row], *, threshold: float = 0.5) -> dict[str, Said]:
    """What the rollouts of some prompts answered, as far as it was written down lately (:data:`MOST`).

    Args:
        folder: ``trainer.rollout_data_dir``.
        prompts: a data set's, by key.
        threshold: a rollout failed if its score is below.

    Raises:
        StoreError: a line is no rollout; with its number.
    """
    read = DumpReader(folder, lambda scores: at_least(scores, threshold).astype(np.float64), most=MOST)
    read.beside(prompts)
    return {key: said for key, said in read.said.items() if key in prompts}
