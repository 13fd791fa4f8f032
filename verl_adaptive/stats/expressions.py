"""Conditions on prompts, as ``visits > 3 and 0.1 <= pass_rate <= 0.9``: parsed and interpreted, never evaluated as code.

Allowed: column names, numbers, quoted text, ``+ - * /``, comparisons (chains too), ``in`` and ``not in`` a list,
``and``, ``or``, ``not``, parentheses. Everything is worked out on whole columns, by Arrow, whose logic has three values.

A value that is not there (the pass rate of a prompt never rolled out) makes a comparison unknown, and unknown does not
satisfy: neither ``pass_rate < 0.1`` nor ``not pass_rate < 0.1`` holds for it. ``visits == 0`` finds those prompts.
"""

from __future__ import annotations

import ast
import difflib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.stats.keys import parse_hex

_LONGEST = 2000
#: Of a key, that are enough to name it: two of a hundred million prompts share 8 hex digits, so a list may show both.
_KEY_DIGITS = 8
_DEEPEST = 40

_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: pc.add,
    ast.Sub: pc.subtract,
    ast.Mult: pc.multiply,
    ast.Div: pc.divide,
}
_UNKNOWN = pa.scalar(None, pa.float64())


class ExpressionError(AdaptiveError):
    """A condition that cannot be understood."""


@dataclass(frozen=True)
class Words:
    """A column of text: few different words, many rows.

    Attributes:
        code: int ``(n,)``, positions in ``words``.
        words: the different texts.
    """

    code: np.ndarray
    words: list[str]


class Columns(Protocol):
    """Where an expression finds its columns."""

    def __len__(self) -> int: ...

    def names(self) -> list[str]:
        """Columns there are."""
        ...

    def get(self, name: str) -> np.ndarray | Words:
        """A column: float64 ``(n,)``, :class:`Words`, or keys (``KEY_DTYPE``)."""
        ...


class Expression:
    """A condition.

    Args:
        text: as the user wrote it.

    Raises:
        ExpressionError: not a condition; the message says what is wrong.

    Example:
        >>> Expression("visits > 3 and pass_rate < 0.1").names
        ['pass_rate', 'visits']
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _LONGEST:
            raise ExpressionError(f"a condition may have {_LONGEST} characters, this one has {len(text)}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError, Warning) as error:
            reason = getattr(error, "msg", None) or str(error) or type(error).__name__
            hint = (
                "; write == for equality" if "=" in text.replace("==", "").replace("<=", "").replace(">=", "") else ""
            )
            raise ExpressionError(f"cannot read the condition {text!r}: {reason}{hint}") from None
        self.names = sorted(_check(self._tree, text, 0))
        if not _is_truth(self._tree):
            raise ExpressionError(f"{text!r} is not a condition: compare something, as in pass_rate < 0.1")

    def select(self, columns: Columns) -> np.ndarray:
        """bool ``(n,)``: the rows that satisfy the condition.

        Raises:
            ExpressionError: unknown column, or text compared with a number.
        """
        truth = _Evaluation(columns, self.text).truth(self._tree)
        if isinstance(truth, pa.Scalar):
            return np.full(len(columns), bool(truth.as_py()))
        return pc.fill_null(truth, False).to_numpy(zero_copy_only=False)


def _dotted(node: ast.AST) -> str | None:
    """``greso.mean_streak`` for a policy's own column."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return None if head is None else f"{head}.{node.attr}"
    return None


def _is_truth(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Compare | ast.BoolOp)
        or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
        or (isinstance(node, ast.Constant) and isinstance(node.value, bool))
    )


def _check(node: ast.AST, text: str, depth: int) -> set[str]:
    """Refuse whatever is not on the list; the names of the columns."""
    if depth > _DEEPEST:
        raise ExpressionError(f"the condition is nested more than {_DEEPEST} deep")
    name = _dotted(node)
    if name is not None:
        return {name}
    children: list[ast.AST] = []
    if isinstance(node, ast.Constant):
        if not isinstance(node.value, bool | int | float | str):
            raise ExpressionError(f"{node.value!r} has no place in a condition")
        if isinstance(node.value, int) and abs(node.value) > 2**1000:
            raise ExpressionError("a number in the condition is too large")
    elif isinstance(node, ast.BoolOp):
        children = list(node.values)
        for child in children:
            if not _is_truth(child):
                raise ExpressionError(f"{ast.unparse(child)!r} is not a condition: compare it with something")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        if not _is_truth(node.operand):
            raise ExpressionError(f"{ast.unparse(node.operand)!r} is not a condition: compare it with something")
        children = [node.operand]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        children = [node.operand]
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        children = [node.left, node.right]
    elif isinstance(node, ast.Compare):
        for op, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, ast.In | ast.NotIn):
                if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                    raise ExpressionError("`in` needs a list, as in source in ['gsm8k', 'math']")
                if not all(isinstance(item, ast.Constant) for item in right.elts):
                    raise ExpressionError("a list in a condition holds numbers or quoted text only")
                children += right.elts
            elif type(op) not in _COMPARISONS:
                raise ExpressionError(f"{text!r}: only < <= > >= == != in, not in compare")
            else:
                children.append(right)
        children.append(node.left)
    else:
        raise ExpressionError(
            f"{text!r}: {ast.unparse(node)!r} has no place in a condition; there are columns, numbers, quoted text, "
            "+ - * /, comparisons, in, and, or, not and parentheses"
        )
    found: set[str] = set()
    for child in children:
        found |= _check(child, text, depth + 1)
    return found


class _Evaluation:
    """Truth: Arrow's booleans, null where it is unknown. Values: Arrow's doubles, null where there is none; or text."""

    def __init__(self, columns: Columns, text: str) -> None:
        self.columns, self.text = columns, text

    # -- truth ----------------------------------------------------------------------------------------------

    def truth(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return pa.scalar(bool(node.value))
        if isinstance(node, ast.UnaryOp):
            return pc.invert(self.truth(node.operand))
        if isinstance(node, ast.BoolOp):
            join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
            return reduce(join, map(self.truth, node.values))
        assert isinstance(node, ast.Compare)
        lefts = [node.left, *node.comparators]
        return reduce(pc.and_kleene, map(self._compare, lefts, node.ops, node.comparators))

    def _compare(self, left: ast.AST, op: ast.AST, right: ast.AST) -> Any:
        if isinstance(op, ast.In | ast.NotIn):
            assert isinstance(right, ast.List | ast.Tuple | ast.Set)
            equal = [self._compare(left, ast.Eq(), item) for item in right.elts]
            found = reduce(pc.or_kleene, equal, pa.scalar(False))
            return found if isinstance(op, ast.In) else pc.invert(found)
        one, other = self.value(left), self.value(right)
        if _is_text(one) or _is_text(other):
            return self._compare_text(one, op, other)
        return _COMPARISONS[type(op)](one, other)

    def _compare_text(self, one: object, op: ast.AST, other: object) -> Any:
        if not isinstance(op, ast.Eq | ast.NotEq):
            raise ExpressionError(f"{self.text!r}: text is compared with ==, != and in")
        if isinstance(one, str):
            one, other = other, one
        if isinstance(one, str):
            same = pa.scalar(one == other)
        elif not isinstance(other, str):
            raise ExpressionError(f"{self.text!r}: text is compared with quoted text, as in source == 'gsm8k'")
        elif isinstance(one, Words):
            same = pa.array(np.array([word == other for word in one.words], dtype=bool)[one.code])
        elif isinstance(one, np.ndarray):
            same = pa.array(_begins(one, other))
        else:
            raise ExpressionError(f"{self.text!r}: a number is compared with the text {other!r}")
        return same if isinstance(op, ast.Eq) else pc.invert(same)

    # -- values ---------------------------------------------------------------------------------------------

    def value(self, node: ast.AST) -> Any:
        name = _dotted(node)
        if name is not None:
            return self._column(name)
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, bool | int | float | str)
            return node.value if isinstance(node.value, str) else pa.scalar(float(node.value))
        if isinstance(node, ast.UnaryOp):
            inner = self._number(node.operand)
            return pc.negate(inner) if isinstance(node.op, ast.USub) else inner
        if isinstance(node, ast.BinOp):
            result = _ARITHMETIC[type(node.op)](self._number(node.left), self._number(node.right))
            return pc.if_else(pc.is_nan(result), _UNKNOWN, result)  # 0 / 0
        raise ExpressionError(f"{self.text!r}: {ast.unparse(node)!r} is a condition where a value is needed")

    def _number(self, node: ast.AST) -> Any:
        value = self.value(node)
        if _is_text(value):
            raise ExpressionError(f"{self.text!r}: {ast.unparse(node)!r} is text, not a number")
        return value

    def _column(self, name: str) -> Any:
        known = self.columns.names()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ExpressionError(f"no column {name!r}; {hint}there are {', '.join(known)}")
        column = self.columns.get(name)
        return column if _is_text(column) else pa.array(column, pa.float64(), from_pandas=True)  # nan: not there


def _begins(keys: np.ndarray, digits: str) -> np.ndarray:
    """Keys that begin with some hex digits; all 32, or at least :data:`_KEY_DIGITS` as tables show them.

    Raises:
        ExpressionError: not hex digits, too few or too many.
    """
    if not re.fullmatch(rf"[0-9a-fA-F]{{{_KEY_DIGITS},32}}", digits):
        raise ExpressionError(
            f"{digits!r} is no prompt key: write its 32 hex digits, or the first {_KEY_DIGITS} or more"
        )
    low, high = parse_hex([digits.lower().ljust(32, "0"), digits.lower().ljust(32, "f")])
    if len(digits) <= 16:
        return (keys["hi"] >= low["hi"]) & (keys["hi"] <= high["hi"])
    return (keys["hi"] == low["hi"]) & (keys["lo"] >= low["lo"]) & (keys["lo"] <= high["lo"])


def _is_text(value: object) -> bool:
    """Quoted text, a column of words, or keys (the one kind of column that Arrow does not hold)."""
    return isinstance(value, str | Words) or (isinstance(value, np.ndarray) and value.dtype.names is not None)
