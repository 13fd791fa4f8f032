"""Conditions on prompts, as ``visits > 3 and 0.1 <= pass_rate <= 0.9``: parsed and interpreted, never evaluated as code.

Allowed: column names, numbers, quoted text, ``+ - * /``, comparisons (chains too), ``in`` and ``not in`` a list,
``and``, ``or``, ``not``, parentheses. Everything is worked out on whole columns, by Arrow, whose logic has three values.

A value that is not there (the pass rate of a prompt never rolled out) makes a comparison unknown, and unknown does not
satisfy: neither ``pass_rate < 0.1`` nor ``not pass_rate < 0.1`` holds for it. ``visits == 0`` finds those prompts.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_adaptive.errors import UsageError, nearest

#: Of a key, that are enough to name it: two of a hundred million prompts share 8 hex digits, so a list may show both.
_KEY_DIGITS = 8
#: Columns of text; every other one is of numbers.
_TEXTS = ("key", "source")

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
_CONDITION, _NUMBER, _TEXT = "a condition", "a number", "text"


class ExpressionError(UsageError):
    """A condition that cannot be understood."""


class Expression:
    """A condition.

    Args:
        text: as the user wrote it.

    Attributes:
        names: the columns that it is about.

    Raises:
        ExpressionError: not a condition; the message says what is wrong.

    Example:
        >>> Expression("visits > 3 and pass_rate < 0.1").names
        ['pass_rate', 'visits']
    """

    def __init__(self, text: str) -> None:
        self.text = text
        asked: set[str] = set()

        def no_rows(name: str) -> pa.Array:
            asked.add(name)
            return pa.array([], pa.string() if name in _TEXTS else pa.float64())

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                self._tree = ast.parse(text.strip(), mode="eval").body
            # what is wrong with it shows without any rows, too
            _Evaluation(text, no_rows).need(_CONDITION, self._tree)
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError, Warning) as error:
            reason = getattr(error, "msg", None) or str(error) or type(error).__name__
            hint = (
                "; write == for equality" if "=" in text.replace("==", "").replace("<=", "").replace(">=", "") else ""
            )
            raise ExpressionError(f"cannot read the condition {text!r}: {reason}{hint}") from None
        self.names = sorted(asked)

    def select(self, prompts: Any) -> np.ndarray:
        """bool ``(n,)``: those of a store's :class:`~verl_adaptive.stats.prompts.Prompts` that satisfy the condition.

        Raises:
            ExpressionError: unknown column.
        """
        check_columns(self.names, prompts.names())
        truth = _Evaluation(self.text, prompts.column).need(_CONDITION, self._tree)
        if isinstance(truth, pa.Scalar):
            return np.full(len(prompts), bool(truth.as_py()))
        return pc.fill_null(truth, False).to_numpy(zero_copy_only=False)


def check_columns(names: Iterable[str], known: Collection[str]) -> None:
    """Refuse a name that is none of the known columns; the ExpressionError has the nearest and all of them."""
    for name in names:
        if name not in known:
            hint = nearest(name, known, "")
            raise ExpressionError(f"no column {name!r}; {hint}{' ' * bool(hint)}there are {', '.join(known)}")


def _dotted(node: ast.AST) -> str | None:
    """``cero.wins`` for a policy's own column."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return None if head is None else f"{head}.{node.attr}"
    return None


class _Evaluation:
    """A condition over columns: conditions are Arrow's booleans, numbers its doubles (null: not known), and there is text.

    Whatever is not named here is refused.
    """

    def __init__(self, text: str, column: Callable[[str], pa.Array]) -> None:
        self._text, self._column = text, column

    def need(self, kind: str, node: ast.AST) -> Any:
        """Evaluate an expression that has to be of this kind."""
        return self._checked(self._value(node), kind, node)

    def _checked(self, value: Any, kind: str, node: ast.AST) -> Any:
        if _kind(value) != kind:
            hint = ": compare it with something, as in pass_rate < 0.1" if kind == _CONDITION else ""
            if kind == _TEXT and (name := _dotted(node)) is not None:
                hint = f": write '{name}' in quotes"
            if kind == _NUMBER and _kind(value) == _TEXT:
                hint = f"; columns of text: {', '.join(_TEXTS)}"
            raise ExpressionError(f"{self._text!r}: {ast.unparse(node)!r} is {_kind(value)}, not {kind}{hint}")
        return value

    def _value(self, node: ast.AST) -> Any:
        if (name := _dotted(node)) is not None:
            column = self._column(name)
            return column if _kind(column) == _TEXT else column.cast(pa.float64(), safe=False)
        match node:
            case ast.Constant(value=bool() | str()):
                return pa.scalar(node.value)
            case ast.Constant(value=int() | float() as number):
                return pa.scalar(float(number))
            case ast.UnaryOp(op=ast.Not()):
                return pc.invert(self.need(_CONDITION, node.operand))
            case ast.UnaryOp(op=ast.USub()):
                return pc.negate(self.need(_NUMBER, node.operand))
            case ast.UnaryOp(op=ast.UAdd()):
                return self.need(_NUMBER, node.operand)
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                number = _ARITHMETIC[type(node.op)](self.need(_NUMBER, node.left), self.need(_NUMBER, node.right))
                return pc.if_else(pc.is_nan(number), _UNKNOWN, number)  # 0 / 0
            case ast.BoolOp():
                join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
                return reduce(join, [self.need(_CONDITION, value) for value in node.values])
            case ast.Compare():
                lefts = [node.left, *node.comparators]
                return reduce(pc.and_kleene, map(self._compare, lefts, node.ops, node.comparators))
        raise ExpressionError(
            f"{self._text!r}: {ast.unparse(node)!r} has no place in a condition; there are columns, numbers, quoted text, "
            "+ - * /, comparisons, in, and, or, not and parentheses"
        )

    def _compare(self, left: ast.AST, op: ast.AST, right: ast.AST) -> Any:
        one = self._value(left)
        if type(op) in _COMPARISONS:
            return self._pair(left, one, op, right)
        if not isinstance(op, ast.In | ast.NotIn):
            raise ExpressionError(f"{self._text!r}: only < <= > >= == != in, not in compare")
        if not isinstance(right, ast.List | ast.Tuple | ast.Set):
            raise ExpressionError("`in` needs a list, as in source in ['gsm8k', 'math']")
        if not all(isinstance(item, ast.Constant | ast.UnaryOp) for item in right.elts):
            raise ExpressionError("a list in a condition holds numbers or quoted text only")
        found = reduce(pc.or_kleene, [self._pair(left, one, ast.Eq(), item) for item in right.elts], pa.scalar(False))
        return found if isinstance(op, ast.In) else pc.invert(found)

    def _pair(self, left: ast.AST, one: Any, op: ast.AST, right: ast.AST) -> Any:
        if _kind(one) != _TEXT:
            return _COMPARISONS[type(op)](self._checked(one, _NUMBER, left), self.need(_NUMBER, right))
        other = self.need(_TEXT, right)
        if not isinstance(op, ast.Eq | ast.NotEq):
            raise ExpressionError(f"{self._text!r}: text is compared with ==, != and in")
        quoted = [value for value in (one, other) if isinstance(value, pa.Scalar)]
        if not quoted:
            raise ExpressionError(f"{self._text!r}: text is compared with quoted text, as in source == 'gsm8k'")
        if "key" in (_dotted(left), _dotted(right)):
            same = pc.starts_with(other if one is quoted[0] else one, _digits(quoted[0].as_py()))
        else:
            same = pc.equal(one, other)
        return same if isinstance(op, ast.Eq) else pc.invert(same)


def _digits(text: str) -> str:
    """Hex digits that a key begins with: all 32, or at least :data:`_KEY_DIGITS` as tables show them; else ExpressionError."""
    if not re.fullmatch(rf"[0-9a-fA-F]{{{_KEY_DIGITS},32}}", text):
        raise ExpressionError(f"{text!r} is no prompt key: write its 32 hex digits, or the first {_KEY_DIGITS} or more")
    return text.lower()


def _kind(value: pa.Array | pa.Scalar) -> str:
    if pa.types.is_boolean(value.type):
        return _CONDITION
    return _TEXT if pa.types.is_string(value.type) else _NUMBER
