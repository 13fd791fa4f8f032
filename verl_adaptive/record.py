"""Record and replay: everything a run's decisions depended on, written down, and the decisions made again from it.

A record is a folder with one folder an attempt (a start or a resume of the run)::

    record/attempt-0/header.json     the adaptive group, the run's facts, how an asynchronous trainer takes its batches
    record/attempt-0/start/          a snapshot of statistics and state when the attempt began
    record/attempt-0/events.jsonl    what happened, in order, one JSON object a line

Events: ``begin`` (a step), ``pull`` (positions that the data gave), ``asked`` (digest of the requests that followed),
``back`` (results, in the order in which they were looked at), ``revive``, ``take`` and ``end`` (digest of what trained and what was
dropped). :func:`replay` runs the policy on the recorded results and compares every digest: a decision that depended on
anything else, a clock or who finished first, shows as a difference. ``sum`` in ``asked``, ``take`` and ``end`` is a hash of the
header, the start and every line before it, so that a record which was changed is not vouched for. It finds changes, not forgery:
whoever writes the whole file anew can write sums that fit.

    adaptive.record=true        # on the command line of a run
    verl-adaptive replay checkpoints/project/experiment/record
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from verl_adaptive.config import AdaptiveConfig, RunFacts
from verl_adaptive.engine import AsyncEngine, AsyncFacts, Engine, PromptStream, Requests, StepResult, make_engine
from verl_adaptive.engine.steps import Listener
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import PER_GROUP, PER_ROLLOUT, Groups
from verl_adaptive.ledger import Ledger
from verl_adaptive.policy import build_policy
from verl_adaptive.stats import read_snapshot, write_snapshot
from verl_adaptive.stats.journal import attempt_folders
from verl_adaptive.stats.snapshot import MANIFEST
from verl_adaptive.text import counted

VERSION = 2
#: No room: a matter of the disk, which may pass, and not of ``adaptive.record``.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LOG = logging.getLogger(__name__)
HEADER, EVENTS, START = "header.json", "events.jsonl", "start"


class RecordError(AdaptiveError):
    """A record cannot be written or read; the message names the file."""


# -- writing ------------------------------------------------------------------------------------------------------


class Recorder(Listener):
    """Writes one attempt of a run down; attach it with ``Recorder(folder, engine)`` before the attempt's first step.

    A disk that is full or gone ends the recording, with a warning; it never ends the run. One that is full when the attempt
    begins records nothing of it.

    Args:
        root: the record's folder; made if need be.
        engine: the run's engine, between two steps.

    Raises:
        RecordError: the folder cannot be written.
    """

    def __init__(self, root: str | os.PathLike[str], engine: Engine) -> None:
        # somebody may have removed earlier ones
        self.folder = Path(root) / f"attempt-{max(attempt_folders(Path(root)), default=-1) + 1}"
        self._step: int | None = None
        self._file: BinaryIO | None = None
        policy, async_facts = engine.policy, engine.async_facts if isinstance(engine, AsyncEngine) else None
        header = {
            "version": VERSION,
            "adaptive": asdict(engine.config),
            "facts": asdict(engine.facts),
            "skip_zero": engine.tracker.skip_zero,
            "async_facts": None if async_facts is None else asdict(async_facts),
            "group_relative": policy.advantage.group_relative,
        }
        made = False
        try:
            self.folder.mkdir(parents=True)
            made = True
            (self.folder / HEADER).write_text(json.dumps(header, indent=1) + "\n")
            state = {"engine": engine.state_dict(), "row_of": engine.row_of}
            write_snapshot(self.folder / START, engine.table, state, meta={})
            self._sum = _seed(self.folder)
            self._file = open(self.folder / EVENTS, "wb")  # noqa: SIM115 - stays open
        except OSError as error:
            if made:
                shutil.rmtree(self.folder, ignore_errors=True)  # half an attempt, which no replay could read
            if error.errno not in _FULL:
                raise RecordError(
                    f"adaptive.record={str(root)!r}: {error}; name a folder that can be written"
                ) from error
            _LOG.warning(
                "adaptive.record: nothing is recorded of this attempt, training goes on: %s cannot be written: %s. Make room; "
                "a resume records a new attempt",
                self.folder,
                error,
            )
            return
        engine.listener = self
        engine.prompt_source.stream = _Overheard(engine.prompt_source.stream, self)

    def close(self, error: OSError | None = None) -> None:
        """Finish the file; ``error``: why the recording ends before the run."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as again:  # what it could not write before it cannot write now
            error = error or again
        if error is not None:
            _LOG.warning(
                "adaptive.record: recording stopped in step %s, training goes on: %s cannot be written: %s. What was recorded "
                "before can be replayed; a resume records a new attempt",
                *(self._step, self.folder / EVENTS, error),
            )

    def _write(self, **event: Any) -> None:
        if self._file is None:
            return
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        try:
            self._file.write(line)
        except OSError as error:
            self.close(error)
        self._sum.update(line)

    def _seal(self, **event: Any) -> None:
        """Write an event with the sum of all that stands before it."""
        self._write(**event, sum=self._sum.hexdigest())

    # what the engine calls

    def begun(self, step: int) -> None:
        self._step = step
        self._write(begin=step)

    def pulled(self, positions: np.ndarray) -> None:
        """The prompt stream gave these positions."""
        self._write(pull=positions.tolist())

    def asked(self, requests: Requests | None) -> None:
        self._seal(asked=_digest_requests(requests))

    def received(self, results: Groups) -> None:
        self._write(back={f.name: getattr(results, f.name).tolist() for f in fields(results)})

    def abandoned(self, rollouts: int, tokens: int) -> None:
        """Requests were given up that had generated this much; for the account, no decision depends on it."""
        self._write(abandon=[rollouts, tokens])

    def revived(self) -> None:
        self._write(revive=True)

    def took(self, result: StepResult) -> None:
        self._seal(take=True, digest=_digest_result(result))

    def finished(self, result: StepResult) -> None:
        """The step is over; on return the system has what was written, so that it outlives the process, not the machine."""
        self._seal(end=_digest_result(result))
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self.close(error)


class _Overheard:
    """The prompt stream, with every answer written down."""

    def __init__(self, stream: PromptStream, recorder: Recorder) -> None:
        self._stream, self._recorder, self.size = stream, recorder, stream.size

    def take(self, count: int) -> np.ndarray:
        positions = self._stream.take(count)
        self._recorder.pulled(np.asarray(positions))
        return positions


def _seed(folder: Path) -> Any:
    """A running hash that begins with the attempt's header and start."""
    return hashlib.blake2b((folder / HEADER).read_bytes() + (folder / START / MANIFEST).read_bytes(), digest_size=16)


def _hash(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def _digest_requests(requests: Requests | None) -> str:
    if requests is None:
        return ""
    return _hash(*(np.asarray(getattr(requests, f.name), dtype="<i8").tobytes() for f in fields(requests)))


def _digest_result(result: StepResult) -> str:
    return _hash(
        result.groups.submission.astype("<i8").tobytes(),
        "\n".join(map(str, result.outcome)).encode(),
        np.packbits(result.trains).tobytes(),
        np.packbits(result.zero_row).tobytes(),
    )


#: What values that no run has written can cause.
_STRANGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


# -- reading ------------------------------------------------------------------------------------------------------


def attempts(root: str | os.PathLike[str]) -> list[Path]:
    """The attempts of a record, oldest first; empty if there are none."""
    return list(attempt_folders(Path(root)).values())


def results_of(event: dict[str, Any]) -> Groups:
    """The results in a ``back`` event.

    Raises:
        ValueError: it is not one.
    """
    types = {**PER_GROUP, **PER_ROLLOUT, "offsets": np.int64}
    data = event["back"]
    if set(data) != set(types):
        raise ValueError(f"a result has the fields {sorted(types)}, not {sorted(data)}")
    groups = Groups(**{name: np.asarray(values, dtype=types[name]) for name, values in data.items()})
    # the sum is in a later line, and what is made of sizes may not fit into memory
    whole = len(groups.offsets) == len(groups) + 1 and (np.diff(groups.offsets) >= 0).all()
    if not whole or {len(getattr(groups, name)) for name in PER_ROLLOUT} != {groups.rollouts}:
        raise ValueError("the lengths of a result's fields do not fit together")
    return groups


def _events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Events with their line numbers; a torn last line, as a kill leaves it, ends the record.

    RecordError: a line cannot be read, or a sum says that one was changed.
    """
    sums = _seed(path.parent)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                raise RecordError(f"{path}, line {number}: {error}") from error
            if not isinstance(event, dict):
                raise RecordError(f"{path}, line {number}: not an event")
            if event.keys() & {"asked", "take", "end"} and event.get("sum") != sums.hexdigest():
                raise RecordError(
                    f"{path}, line {number}: the record was changed after the run wrote it: {HEADER}, {START} and the lines "
                    "above do not add up to the sum here"
                )
            sums.update(line)
            yield number, event


@dataclass
class ReplayReport:
    """What a replay found.

    Attributes:
        attempt: name of the attempt.
        planned: the run's last step, as it was planned.
        steps: whole steps replayed.
        decisions: decisions compared, of whatever kind.
        polls: times results came back.
        rollouts: rollouts in them.
        difference: the first decision that came out differently, or an empty string.
        open_step: the step in which the record ends (a killed run's), or None.
        ledgers: the account of each whole step.
        last: the last whole step.
    """

    attempt: str
    planned: int
    steps: int = 0
    decisions: int = 0
    polls: int = 0
    rollouts: int = 0
    difference: str = ""
    open_step: int | None = None
    ledgers: list[Ledger] = field(default_factory=list, repr=False)
    last: int = 0

    @property
    def identical(self) -> bool:
        """There were decisions, and every one came out the same."""
        return not self.difference and not self.empty

    @property
    def empty(self) -> bool:
        """Nothing was recorded that could be compared, as in an attempt that was killed before its first step."""
        return not self.difference and not self.decisions

    def __str__(self) -> str:
        if self.empty:
            return f"{self.attempt}: the record is empty, there is nothing to compare"
        seen = f"{self.attempt}: {counted(self.steps, 'step')}, {counted(self.polls, 'poll')}, {counted(self.rollouts, 'rollout')}"
        tail = "" if self.open_step is None else f" (the record ends within step {self.open_step} of {self.planned})"
        if not tail and self.last < self.planned:
            tail = f" (the record ends after step {self.last} of {self.planned})"
        return f"{seen}: {self.difference or 'every decision identical'}{tail}"


class _Script:
    """The prompt stream of a record: what it gave, given again."""

    def __init__(self, events: Iterator[tuple[int, dict[str, Any]]], size: int) -> None:
        self._events, self.size = events, size

    def take(self, count: int) -> np.ndarray:
        number, event = next(self._events, (0, None))
        if event is None:
            raise _Ended
        if "pull" not in event:
            raise _Diverged(f"line {number}: the replay asked the data for {count} prompts where the run did not")
        return np.asarray(event["pull"], dtype=np.int64)


class _Diverged(Exception):
    """The replay left the recorded path."""


def _load_engine(folder: Path, events: Iterator[tuple[int, dict[str, Any]]]) -> Engine:
    """The engine of an attempt as it was when the attempt began, on the stream of its events.

    RecordError: the header is missing, damaged, of another version, or holds what no run has written.
    """
    path = folder / HEADER
    try:
        header = json.loads(path.read_text())
        if header["version"] != VERSION:
            raise ValueError(f"version {header['version']}, this verl-adaptive reads version {VERSION}")
        config = AdaptiveConfig.from_mapping(header["adaptive"])
        facts = RunFacts(**header["facts"])
        async_facts = None if header["async_facts"] is None else AsyncFacts(**header["async_facts"])
        skip_zero, group_relative = bool(header["skip_zero"]), bool(header["group_relative"])
    except (OSError, AdaptiveError, *_STRANGE) as error:
        raise RecordError(f"{path} cannot be read: {error!r}") from error
    table, state, _ = read_snapshot(folder / START)
    try:
        policy = build_policy(config)
        policy.advantage.group_relative = group_relative
        row_of, stream = np.asarray(state["row_of"], dtype=np.int64), _Script(events, int(state["engine"]["size"]))
        engine = make_engine(policy, table, config, facts, row_of, stream, skip_zero=skip_zero, async_facts=async_facts)
        engine.load_state_dict(state["engine"])
    except _STRANGE as error:
        raise RecordError(f"{path} and {START} make no engine: {error!r}") from error
    return engine


def replay(folder: str | os.PathLike[str]) -> ReplayReport:
    """Run the policy of one attempt on its recorded results.

    Args:
        folder: an attempt's folder (see :func:`attempts`).

    Raises:
        RecordError: the record is missing or damaged.
    """
    folder = Path(folder)
    path = folder / EVENTS
    if not path.is_file():
        raise RecordError(f"{path} does not exist; a record is written by a run with adaptive.record=true")
    events = _events(path)
    engine = _load_engine(folder, events)
    report = ReplayReport(folder.name, engine.facts.steps)
    step = 0
    for number, event in events:
        try:
            if "begin" in event:
                step = report.open_step = int(event["begin"])
                _same_requests(events, engine.begin(step), report)
            elif "back" in event:
                results = results_of(event)
                report.polls += 1
                report.rollouts += results.rollouts
                _same_requests(events, engine.receive(results), report)
            elif "abandon" in event:
                engine.abandon(*map(int, event["abandon"]))
            elif "revive" in event and isinstance(engine, AsyncEngine):
                _same_requests(events, engine.revive(), report)
            elif "take" in event and isinstance(engine, AsyncEngine):
                if _digest_result(engine.take()) != event["digest"]:
                    raise _Diverged(f"line {number}: another batch was taken")
                report.decisions += 1
            elif "end" in event:
                result = engine.finish()
                if _digest_result(result) != event["end"]:
                    raise _Diverged(f"line {number}: other groups trained or were dropped")
                report.steps += 1
                report.last = step
                report.decisions += 1
                report.ledgers.append(result.ledger)
                report.open_step = None
            else:
                raise RecordError(f"{path}, line {number}: unexpected event {sorted(event)}")
        except _Ended:
            break
        except _Diverged as difference:
            report.difference = f"step {step}, {difference}"
            break
        except (AdaptiveError, *_STRANGE) as error:
            if isinstance(error, RecordError):
                raise
            report.difference = f"step {step}, line {number}: {error}"
            break
    return report


class _Ended(Exception):
    """The record ends here."""


def _same_requests(
    events: Iterator[tuple[int, dict[str, Any]]], requests: Requests | None, report: ReplayReport
) -> None:
    number, event = next(events, (0, None))
    if event is None:
        raise _Ended
    if "asked" not in event:
        raise _Diverged(f"line {number}: the run asked the data for more prompts than the replay")
    if event["asked"] != _digest_requests(requests):
        raise _Diverged(f"line {number}: other rollouts were asked for")
    report.decisions += 1
