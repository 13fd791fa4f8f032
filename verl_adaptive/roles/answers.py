"""What parts answer, looked at before it decides anything.

numpy accepts a mask of whole numbers, positions instead of a mask, or a row that is not in the pool. Other prompts or rollouts
than the author meant would then be used. So an answer that is not what the role promises is an error. It names the part, the
method, and what it should have said.
"""

from __future__ import annotations

import sys
import traceback
from contextlib import nullcontext
from numbers import Integral
from typing import Any

import numpy as np

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.roles import HOLD, Advantage, Allocator, Filter, Pick, Role, Sampler, Verdict
from verl_adaptive.roles.pooled import PooledAllocator
from verl_adaptive.text import counted


def who(part: Role) -> str:
    """A part, for messages: its role, name and class."""
    return f"{part.role} {part.name} ({type(part).__module__}.{type(part).__qualname__})"


def ask(part: Role, method: str, *about: Any) -> Any:
    """What a part answers.

    Raises:
        AdaptiveError: it fails; says which part, and where.
    """
    table = getattr(part, "table", None)
    for value in about:  # the engine and the other parts read it afterwards
        for array in vars(value).values() if isinstance(value, Groups) else (value,):
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
    try:
        with nullcontext() if table is None else table.read_only():
            return getattr(part, method)(*about)
    except (AdaptiveError, AssertionError):  # an assertion is a test's, and speaks for itself
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = getattr(sys.modules.get(type(part).__module__), "__file__", None)
        at = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
        raise AdaptiveError(
            f"{who(part)}.{method} fails: {type(error).__name__}: {error} ({at.filename}, line {at.lineno})"
        ) from error


def admit(part: Sampler, rows: np.ndarray, position: np.ndarray, progress: Progress) -> np.ndarray:
    """bool ``(k,)``: prompts of the stream that are let through."""
    return _flags(part, "admit", ask(part, "admit", rows, position, progress), len(rows), "prompt")


def pick(part: Sampler, pool: np.ndarray, count: int, progress: Progress) -> tuple[np.ndarray, np.ndarray | None]:
    """int64 ``(k,)``, table rows in the order to submit; int64 ``(k,)``, the rollouts planned for each, or None."""
    found = ask(part, "pick", pool, count, progress)
    if not isinstance(found, Pick):
        raise _wrong(part, "pick", "Pick(rows), or Pick(rows, n)", found)
    rows = _amounts(part, "pick", found.rows, None, "prompt", 0)
    once, times = np.unique(rows, return_counts=True)
    if len(once) < len(rows):
        raise AdaptiveError(
            f"{who(part)}.pick picks a prompt twice: row {once[times > 1][0]}; in a step a prompt has one group"
        )
    if len(rows) and (found.n is not None) != part.plans_rollouts:
        said, needs = ("Pick(rows)", False) if found.n is None else ("Pick(rows, n)", True)
        raise AdaptiveError(
            f"{who(part)}.pick answers {said}, which needs plans_rollouts = {needs}; its plans_rollouts is {not needs}"
        )
    return rows, None if found.n is None else _amounts(part, "pick (n)", found.n, len(rows), "prompt", 1)


def amount(part: Role, method: str, *about: Any) -> int:
    """A number of prompts or groups."""
    found = ask(part, method, *about)
    whole = isinstance(found, Integral) or (isinstance(found, float) and found.is_integer())
    if isinstance(found, bool) or not whole or found < 0:
        raise _wrong(part, method, "a whole number, 0 or greater", found)
    return int(found)


def first(part: Allocator, rows: np.ndarray, planned: np.ndarray | None, progress: Progress) -> np.ndarray:
    """int64 ``(k,)``: first rollouts of new prompts."""
    return _amounts(part, "first", ask(part, "first", rows, planned, progress), len(rows), "prompt", 1)


def most(part: Allocator, n: np.ndarray, stage: np.ndarray) -> np.ndarray:
    """int64 ``(k,)``: the most further rollouts that groups of ``n`` may ask for."""
    return _amounts(part, "most", ask(part, "most", n, stage), len(n), "group", 0)


def fund(part: Allocator, n: np.ndarray, planned: np.ndarray | None) -> np.ndarray | None:
    """int64 ``(k,)``: what new prompts pay into the pool of top-ups, or None."""
    found = ask(part, "fund", n, planned) if isinstance(part, PooledAllocator) else None
    return None if found is None else _amounts(part, "fund", found, len(n), "prompt", 0)


def more(part: Allocator, method: str, groups: Groups, *about: Any) -> np.ndarray:
    """int64 ``(G,)``: what ``review`` or ``recall`` says of each group."""
    found = _amounts(part, method, ask(part, method, groups, *about), len(groups), "group", HOLD)
    may = isinstance(part, PooledAllocator) and (part.can_hold or method == "recall")
    if (found == HOLD).any() and not may:
        raise AdaptiveError(f"{who(part)}.{method} says HOLD, which only a PooledAllocator with can_hold = True may")
    asks = found > 0
    if asks.any():
        want, n, stage = found[asks], groups.n[asks], groups.reduce(np.maximum, groups.stage)[asks]
        before, after = most(part, n, stage), most(part, n + want, stage + 1)
        over = np.flatnonzero(before - want < after)
        if len(over):
            i = over[0]
            raise AdaptiveError(
                f"{who(part)}.{method} asks for {counted(want[i], 'more rollout')} for a group of {n[i]} after "
                f"{counted(stage[i], 'top-up')}; its most answers {before[i]} before them and {after[i]} after them: it must fall "
                "by at least what is asked for, so that every group ends"
            )
    return found


def complete(part: Allocator, groups: Groups) -> np.ndarray:
    """bool ``(G,)``: closed groups that may train."""
    if not isinstance(part, PooledAllocator):
        return np.ones(len(groups), dtype=bool)
    return _flags(part, "complete", ask(part, "complete", groups), len(groups), "group")


def decide(part: Filter, groups: Groups, progress: Progress) -> Verdict:
    """The verdict: whole, with a reason for every group that is dropped and a rollout for every one that is kept."""
    found = ask(part, "decide", groups, progress)
    if not isinstance(found, Verdict):
        raise _wrong(part, "decide", "Verdict(keep, reason)", found)
    keep = _flags(part, "decide (keep)", found.keep, len(groups), "group")
    if part.keeps_all and not keep.all():
        raise AdaptiveError(f"{who(part)}.decide drops a group, and its keeps_all is True: set keeps_all = False")
    reason = _amounts(part, "decide (reason)", found.reason, len(groups), "group", None)
    unnamed = ~keep & ((reason < 0) | (reason >= len(part.reasons)))
    if unnamed.any():
        raise AdaptiveError(
            f"{who(part)}.decide drops a group for reason {reason[unnamed][0]}, and reasons = {tuple(part.reasons)!r} has "
            f"{len(part.reasons)}: name every reason there, and give its index"
        )
    if found.rollouts is None:
        return Verdict(keep, reason)
    rollouts = _flags(part, "decide (rollouts)", found.rollouts, groups.rollouts, "rollout")
    left = groups.sum(rollouts.astype(np.float64))
    if (keep & (left == 0)).any():
        raise AdaptiveError(
            f"{who(part)}.decide keeps a group of which no rollout trains: drop it with a reason, or let one train"
        )
    if not part.may_leave_one and (keep & (groups.n > 1) & (left == 1)).any():
        raise AdaptiveError(
            f"{who(part)}.decide lets a single rollout of a group train, which has nothing to be compared with: drop the "
            "group with a reason, or set may_leave_one = True, which is refused where the advantage compares"
        )
    return Verdict(keep, reason, rollouts)


def zero(part: Advantage, groups: Groups, trains: np.ndarray) -> np.ndarray:
    """bool ``(R,)``: rollouts whose advantage is certain to be zero."""
    return _flags(part, "zero", ask(part, "zero", groups, trains), groups.rollouts, "rollout")


def compute(part: Advantage, reward: np.ndarray, group_of: np.ndarray, observed: Groups) -> np.ndarray:
    """float64 ``(R,)``: the advantages."""
    answer = ask(part, "compute", reward, group_of, observed)
    found = np.asarray(answer)
    if found.shape != reward.shape or found.dtype.kind not in "fiu":
        raise _wrong(part, "compute", f"numbers of shape ({len(reward)},), one for each rollout", answer)
    lost = ~np.isfinite(found)
    if lost.any():
        raise AdaptiveError(
            f"{who(part)}.compute answers {found[lost][0]} for {int(lost.sum())} of {len(found)} rollouts (the first with "
            f"reward {reward[lost][0]:g}, in a group of {observed.n[group_of[lost][0]]}): an advantage is finite"
        )
    return found.astype(np.float64)


def _flags(part: Role, method: str, found: Any, size: int, each: str) -> np.ndarray:
    made = np.asarray(found)
    if made.dtype != bool or made.shape != (size,):
        raise _wrong(part, method, f"bool of shape ({size},), one for each {each}", found)
    return made


def _amounts(part: Role, method: str, found: Any, size: int | None, each: str, least: int | None) -> np.ndarray:
    made = np.asarray(found)
    if made.size == 0 and made.ndim == 1 and not size:
        return made.astype(np.int64)
    whole = made.dtype.kind in "iu" or (
        made.dtype.kind == "f" and bool((np.isfinite(made) & (np.floor(made) == made)).all())
    )
    right = made.ndim == 1 and (size is None or len(made) == size)
    if not (whole and right and (least is None or (made >= least).all())):
        bound = "" if least is None else f", {least} or greater"
        shape = "one" if size is None else f"shape ({size},), one"
        raise _wrong(part, method, f"whole numbers{bound}, {shape} for each {each}", found)
    return made.astype(np.int64)


def _wrong(part: Role, method: str, wanted: str, found: Any) -> AdaptiveError:
    said = f"{type(found).__name__} {found!r:.60}"
    if isinstance(found, np.ndarray):
        said = f"{found.dtype} of shape {found.shape}"
        if found.size and found.dtype.kind in "iuf":
            said += f", from {found.min():g} to {found.max():g}"
    return AdaptiveError(f"{who(part)}.{method} must answer {wanted}; it answered {said}")
