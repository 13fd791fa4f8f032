"""Conditions on prompts, as ``visits > 3 and 0.1 <= pass_rate <= 0.9``: parsed and interpreted, never evaluated as code.

Allowed: column names, numbers, quoted text, ``+ - * /``, comparisons (chains too), ``in`` and ``not in`` a list,
``and``, ``or``, ``not``, parentheses. Everything is worked out on whole columns.

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
from typing import Protocol

import numpy as np

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.stats.keys import parse_hex

__all__ = ["Columns", "Expression", "ExpressionError", "Words"]

_LONGEST = 2000
#: Of a key, that are enough to name it: two of a hundred million prompts share 8 hex digits, so a list may show both.
_KEY_DIGITS = 8
_DEEPEST = 40

_NUMBERS: dict[type, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
}
_ARITHMETIC: dict[type, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
}


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


@dataclass(frozen=True)
class _Truth:
    """Three-valued: rows that satisfy, rows that do not; in neither: unknown."""

    yes: np.ndarray
    no: np.ndarray


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
        with np.errstate(all="ignore"):
            return np.broadcast_to(_Evaluation(columns, self.text).truth(self._tree).yes, (len(columns),)).copy()


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
            elif type(op) not in _NUMBERS:
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
    def __init__(self, columns: Columns, text: str) -> None:
        self.columns, self.text = columns, text

    # -- truth ----------------------------------------------------------------------------------------------

    def truth(self, node: ast.AST) -> _Truth:
        if isinstance(node, ast.Constant):
            return _Truth(np.array(bool(node.value)), np.array(not node.value))
        if isinstance(node, ast.UnaryOp):
            inner = self.truth(node.operand)
            return _Truth(inner.no, inner.yes)
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(value) for value in node.values]
            yes, no = parts[0].yes, parts[0].no
            for part in parts[1:]:
                if isinstance(node.op, ast.And):
                    yes, no = yes & part.yes, no | part.no
                else:
                    yes, no = yes | part.yes, no & part.no
            return _Truth(yes, no)
        assert isinstance(node, ast.Compare)
        left = node.left
        yes, no = np.array(True), np.array(False)
        for op, right in zip(node.ops, node.comparators, strict=True):
            part = self._compare(left, op, right)
            yes, no = yes & part.yes, no | part.no
            left = right
        return _Truth(yes, no)

    def _compare(self, left: ast.AST, op: ast.AST, right: ast.AST) -> _Truth:
        if isinstance(op, ast.In | ast.NotIn):
            assert isinstance(right, ast.List | ast.Tuple | ast.Set)
            parts = [self._compare(left, ast.Eq(), item) for item in right.elts]
            yes, no = np.array(False), np.array(True)
            for part in parts:
                yes, no = yes | part.yes, no & part.no
            return _Truth(yes, no) if isinstance(op, ast.In) else _Truth(no, yes)
        one, other = self.value(left), self.value(right)
        if _is_text(one) or _is_text(other):
            return self._compare_text(one, op, other)
        assert isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
        result = _NUMBERS[type(op)](one, other)
        known = ~(np.isnan(one) | np.isnan(other))
        return _Truth(result & known, ~result & known)

    def _compare_text(self, one: object, op: ast.AST, other: object) -> _Truth:
        if not isinstance(op, ast.Eq | ast.NotEq):
            raise ExpressionError(f"{self.text!r}: text is compared with ==, != and in")
        if isinstance(one, str):
            one, other = other, one
        if isinstance(one, str):
            same = np.array(one == other)
        elif not isinstance(other, str):
            raise ExpressionError(f"{self.text!r}: text is compared with quoted text, as in source == 'gsm8k'")
        elif isinstance(one, Words):
            same = np.array([word == other for word in one.words], dtype=bool)[one.code]
        elif isinstance(one, np.ndarray) and one.dtype.names is not None:
            same = _begins(one, other)
        else:
            raise ExpressionError(f"{self.text!r}: a number is compared with the text {other!r}")
        return _Truth(same, ~same) if isinstance(op, ast.Eq) else _Truth(~same, same)

    # -- values ---------------------------------------------------------------------------------------------

    def value(self, node: ast.AST) -> np.ndarray | Words | str:
        name = _dotted(node)
        if name is not None:
            return self._column(name)
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, bool | int | float | str)
            return node.value if isinstance(node.value, str) else np.array(float(node.value))
        if isinstance(node, ast.UnaryOp):
            inner = self._number(node.operand)
            return np.asarray(-inner) if isinstance(node.op, ast.USub) else inner
        if isinstance(node, ast.BinOp):
            return np.asarray(_ARITHMETIC[type(node.op)](self._number(node.left), self._number(node.right)))
        raise ExpressionError(f"{self.text!r}: {ast.unparse(node)!r} is a condition where a value is needed")

    def _number(self, node: ast.AST) -> np.ndarray:
        value = self.value(node)
        if _is_text(value):
            raise ExpressionError(f"{self.text!r}: {ast.unparse(node)!r} is text, not a number")
        assert isinstance(value, np.ndarray)
        return value

    def _column(self, name: str) -> np.ndarray | Words:
        known = self.columns.names()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ExpressionError(f"no column {name!r}; {hint}there are {', '.join(known)}")
        return self.columns.get(name)


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
    return isinstance(value, str | Words) or (isinstance(value, np.ndarray) and value.dtype.names is not None)
