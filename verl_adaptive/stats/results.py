"""Results of an offline evaluation, from Parquet or JSON lines, as a statistics table.

Columns that say which prompt a row is about, the first that is there:

===================================  =================================================================================
``key``                              the prompt's key, 32 hex digits or 16 bytes
the column named by ``id_key``       the user's own identifier (``adaptive.id_key``)
``prompt``, ``data_source`` and      the content, exactly as in the training set; the answer may also be verl's
``ground_truth``                     ``reward_model`` struct; images beside the messages are needed too
===================================  =================================================================================

and columns that say how it went, the first that are there:

===================================  =================================================================================
``n`` and ``successes``              rollouts and how many of them succeeded
``n`` and ``pass_rate``              rollouts and the fraction of them that succeeded
``score``                            one number a row (one row a rollout), or a list of them (one row a prompt)
``prior``                            what somebody expects of the prompt who has not rolled it out: a mean reward in [0, 1],
                                     which counts as 8 rollouts, half of them by the usual ``adaptive.warm_start_discount``
===================================  =================================================================================

Rows with ``n`` 0 are left out: an export has prompts that were never rolled out.

``tokens`` is optional: response tokens of what the row stands for. So are, beside ``n``, the columns of an export:
``reward_sum``, ``signal_sum`` and ``signal_sqsum``. A ``score`` is both, on the scale of the training reward; a count of
successes alone says nothing of rewards. Other columns are ignored.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl_adaptive.groups import success_by_default
from verl_adaptive.stats import keys as _keys
from verl_adaptive.stats.files import StoreError, file_rows
from verl_adaptive.stats.keys import CONTENT, Identity
from verl_adaptive.stats.table import StatsTable
from verl_adaptive.stats.visits import Visits

_MOST = 2**31 - 1  # rollouts of a prompt; the table counts in 32 bits
_LARGEST = 1e150  # of sums: many rows of one prompt are added up
_PRIOR = 8.0  # rollouts that an expectation counts for: half of them, κ = 4, were measured (benchmarks/RESULTS.md)


def _key(row: Mapping[str, Any], identity: Identity) -> bytes:
    value = row.get("key")
    if value is not None:
        digits = value.hex() if isinstance(value, bytes) else str(value)
        if not re.fullmatch("[0-9a-fA-F]{32}", digits):
            raise ValueError(f"not a prompt key (16 bytes, or 32 hex digits): {value!r}")
        return bytes.fromhex(digits)
    if identity.id_key is not None:
        found = _keys.dig(row, identity.id_key)
        if found is None:
            raise ValueError(f"neither key nor {identity.id_key} (adaptive.id_key)")
        return _keys.custom_key(found)
    messages = row.get(identity.prompt_key)
    if messages is None:
        raise ValueError(
            f"neither key nor {identity.prompt_key} says which prompt it is about; it has: {', '.join(row)}"
        )
    answer = row["ground_truth"] if "ground_truth" in row else _keys.dig(row, "reward_model.ground_truth")
    return _keys.prompt_key(row.get("data_source"), messages, answer, identity.media_of(row))


def _outcome(row: Mapping[str, Any], success: Callable[[np.ndarray], np.ndarray]) -> tuple[float, ...]:
    """``n, successes, signal sum, signal squares, reward sum, lowest, highest`` of a row; nan: no reward is known."""
    if row.get("n") is not None:
        n = row["n"]
        if isinstance(n, bool) or not isinstance(n, int | float) or not 1 <= n <= _MOST or n != int(n):
            raise ValueError(f"n={n!r} is not a positive whole number of at most {_MOST}")
        name = next((name for name in ("successes", "pass_rate") if row.get(name) is not None), None)
        if name is None:
            raise ValueError("n needs successes or pass_rate beside it")
        c = _number(row, name) * (n if name == "pass_rate" else 1)
        if not 0 <= c <= n * (1 + 1e-9):
            raise ValueError(f"{name}={row[name]!r}: {c} successes in {n} rollouts")
        c = min(c, float(n))
        reward = _sum(row, "reward_sum", math.nan)
        # Where only the count is known, as if each rollout had scored 0 or 1.
        signal, squares = _sum(row, "signal_sum", c), _sum(row, "signal_sqsum", c)
        low, high = float(c >= n), float(c > 0)
        if row.get("signal_sum") is not None and row.get("signal_sqsum") is not None:
            low, high = _apart(n, signal, squares)
        return float(n), c, signal, squares, reward, low, high
    if row.get("score") is None and row.get("prior") is not None:
        p = _number(row, "prior")
        if not 0 <= p <= 1:
            raise ValueError(f"prior={row['prior']!r} is not an expected reward in [0, 1]; map your score to one first")
        total = _PRIOR * p
        return _PRIOR, total, total, total, total, 0.0, 1.0  # an opinion: nobody has seen that all are alike
    if row.get("score") is None:
        null = next((f"{name} is null" for name in ("n", "score") if name in row), "")
        nothing = null or f"it has: {', '.join(row)}"
        raise ValueError(f"neither n (beside pass_rate or successes), score nor prior says how it went; {nothing}")
    try:
        scores = np.atleast_1d(np.asarray(row["score"], dtype=np.float64))
    except (TypeError, ValueError):
        scores = np.zeros(0)
    with np.errstate(over="ignore"):
        squares = float((scores * scores).sum())
    if scores.ndim != 1 or not len(scores) or not math.isfinite(squares):
        raise ValueError(f"score={row['score']!r} is not a finite number or a list of them, or too large to be squared")
    total = float(scores.sum())
    right, low, high = (float(value) for value in (success(scores).sum(), scores.min(), scores.max()))
    return float(len(scores)), right, total, squares, total, low, high


def _apart(n: float, total: float, squares: float) -> tuple[float, float]:
    """Two values that the lowest and the highest of n signals are at least as far apart as: the mean less and plus a deviation."""
    mean = total / n
    variance = squares / n - mean * mean
    deviation = math.sqrt(variance) if variance > 1e-12 * squares / n else 0.0  # below it is what rounding left
    return mean - deviation, mean + deviation


def _number(row: Mapping[str, Any], name: str) -> float:
    try:
        return float(row[name])
    except (TypeError, ValueError):
        raise ValueError(f"{name}={row[name]!r} is not a number") from None


def _sum(row: Mapping[str, Any], name: str, otherwise: float) -> float:
    if row.get(name) is None:
        return otherwise
    value = _number(row, name)
    if not abs(value) <= _LARGEST:
        raise ValueError(f"{name}={row[name]!r} is not a number of at most {_LARGEST:g}")
    return value


def _tokens(row: Mapping[str, Any]) -> float:
    tokens = _number(row, "tokens") if row.get("tokens") else 0.0
    if not 0 <= tokens <= 2**53:
        raise ValueError(f"tokens={row['tokens']!r} is not a number of tokens")
    return tokens


def read_results(
    path: Path,
    *,
    identity: Identity = CONTENT,
    success: Callable[[np.ndarray], np.ndarray] = success_by_default,
    tolerance: float = 0.0,
) -> StatsTable:
    """Read an offline evaluation; all rows of one prompt together count as one visit.

    Args:
        path: a Parquet file or one with a JSON object a line; columns as in this module's description.
        identity: its columns that say which prompt a row is about.
        success: what each ``score`` says of success, in [0, 1]: :meth:`verl_adaptive.config.SuccessConfig.of`.
        tolerance: as in :meth:`StatsTable.observe`.

    Raises:
        StoreError: not readable, or a row lacks what is needed; the message names file, row and column.
    """
    keys: list[bytes] = []
    outcomes = array("d")  # a row's numbers one after the other: an evaluation may have millions of rows
    sources: list[str] = []
    for number, row in enumerate(file_rows(path)):
        if row.get("n") == 0:
            continue
        try:
            keys.append(_key(row, identity))
            outcomes.extend((*_outcome(row, success), _tokens(row)))
        except (ValueError, TypeError, OverflowError) as error:
            raise StoreError(f"{path}, row {number}: {error}") from error
        sources.append(str(row.get("data_source") or row.get("source") or ""))
    if not keys:  # an evaluation that wrote nothing is no evaluation of no prompts
        raise StoreError(f"{path} has no results; give one row a rollout or a prompt, or leave it out")
    table = StatsTable()
    rows = table.rows_for(_keys.keys_array(keys), sources=sources)
    n, c, signal, squares, reward, low, high, tokens = np.array(outcomes).reshape(len(keys), -1).T
    count = len(table)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(rows, weights=values, minlength=count)

    if total(n).max() > _MOST:
        raise StoreError(f"{path}: more than {_MOST} rollouts of one prompt")
    lowest, highest = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(lowest, rows, low)
    np.maximum.at(highest, rows, high)
    visits = Visits(
        row=np.arange(count),
        step=np.full(count, -1),
        n=total(n).astype(np.int64),
        success=total(c),
        signal=total(signal),
        square=total(squares),
        reward=total(np.nan_to_num(reward)),
        tokens=total(tokens),
        flat=highest - lowest <= tolerance,
        failed=np.zeros(count, dtype=bool),
    )
    table.observe_visits(visits)
    table.col("reward_sum")[rows[np.isnan(reward)]] = math.nan
    return table
