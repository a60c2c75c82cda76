"""Filter expressions as text: `year >= 2010 and lang in ['en', 'de'] and not draft`.

Python's own grammar read by `ast`, of which only comparisons of fields with values, `and`, `or`, `not`, `in` and
`is None` are taken; nothing is ever evaluated.
"""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from shortlist.errors import ConfigError
from shortlist.indexes.filters import AllOf, AnyOf, Comparison, Filter, Known, Negation

_LONGEST = 1 << 20  # characters; longer ones are lists of ids, which are given as a set
_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.In: "in",
    ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip
_MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_GUIDE = "A filter reads like: 2000 <= year < 2010 and (lang in ['en', 'de'] or 'law' in tags) and not draft."
_OTHER_WORDS = {"true": "True", "false": "False", "null": "None", "none": "None"}
_OURS = {"and", "or", "not", "in", "is", "True", "False", "None"}


@lru_cache(maxsize=256)
def parse_filter(expression: str) -> Filter:
    """The filter that `expression` says.

    Fields are written by name (`year`), or as `field("publication year")` where the name is no Python name. A bool
    field may stand alone (`not draft`).

    Raises:
        ConfigError: something that is no filter, with the expression and the place in it.
    """
    text = expression.strip()
    if not text:
        raise ConfigError(f"the filter is empty. {_GUIDE}")
    if len(text) > _LONGEST:
        raise ConfigError(
            f"the filter has {len(text):,} characters, more than {_LONGEST:,}; pass many ids as a set (filter={{…}})."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # `year is 3` is refused below, in our own words
            # Parentheses, so that an expression may run over several lines.
            tree = ast.parse(f"({text}\n)", mode="eval")
    except SyntaxError as error:
        place = _place(text, error.lineno or 1, (error.offset or 1) - 1)
        raise ConfigError(f"the filter {text!r:.300} is not understood ({place}){_hint(text)}. {_GUIDE}") from None
    except (ValueError, RecursionError, MemoryError):
        raise ConfigError(
            f"the filter {text!r:.200} is nested too deeply or holds a character that is none. {_GUIDE}"
        ) from None
    try:
        return _Reader(text).condition(tree.body)
    except RecursionError:
        raise ConfigError(f"the filter {text!r:.200} is nested too deeply. {_GUIDE}") from None


class _Reader:
    def __init__(self, text: str):
        self._text = text

    def condition(self, node: ast.expr) -> Filter:
        """A node that is true or false of a document."""
        if isinstance(node, ast.BoolOp):
            parts = tuple(self.condition(value) for value in node.values)
            return AllOf(parts) if isinstance(node.op, ast.And) else AnyOf(parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return Negation(self.condition(node.operand))
        if isinstance(node, ast.Compare):
            return self._comparisons(node)
        name = self._name(node)
        if name is not None:
            return Comparison(name, "==", True)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
            raise self._refused(node, "joins with & or |, which bind tighter than comparisons here; write and, or")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            raise self._refused(node, "negates with ~; write not")
        if isinstance(node, ast.Constant):
            raise self._refused(node, "is a value that is compared with no field")
        raise self._refused(node, f"is {_what(node)}, which a filter cannot hold")

    def _comparisons(self, node: ast.Compare) -> Filter:
        """One comparison, or several in a chain: `2000 <= year < 2010` is both of them."""
        operands = [node.left, *node.comparators]
        parts = tuple(
            self._comparison(left, _OPERATORS[type(op)], right)
            for left, op, right in zip(operands, node.ops, operands[1:], strict=False)
        )
        return parts[0] if len(parts) == 1 else AllOf(parts)

    def _comparison(self, left: ast.expr, op: str, right: ast.expr) -> Filter:
        name, other = self._name(left), self._name(right)
        if name is not None and other is not None:
            raise self._refused(right, f"would be another field; compare {name!r} with a value, a text in quotes")
        if name is None and other is None:
            for node in (left, right):
                if not isinstance(node, (ast.Constant, ast.List, ast.Tuple, ast.Set)):
                    self._value(node)
            raise self._refused(left, "is compared with no field: a comparison needs a field on one side")
        if op in ("is", "is not"):
            value = right if name is not None else left
            if not (isinstance(value, ast.Constant) and value.value is None):
                raise self._refused(value, "stands beside `is`, which takes None alone; compare values by == or !=")
            known: Filter = Known(name or other or "")
            return known if op == "is not" else Negation(known)
        if op in ("in", "not in"):
            if other is not None:  # 'law' in tags: the list field holds the value
                return self._made(left, other, "==" if op == "in" else "!=", self._value(left))
            return self._made(right, name or "", op, self._values(right))
        if other is not None:
            return self._made(left, other, _MIRRORED[op], self._value(left))
        return self._made(right, name or "", op, self._value(right))

    def _made(self, node: ast.expr, name: str, op: str, value: Any) -> Filter:
        try:
            return Comparison(name, op, value)
        except ConfigError as error:
            raise ConfigError(f"{self._where(node)}: {error}") from None

    def _name(self, node: ast.expr) -> str | None:
        """The field that a node names, None where it names none."""
        if isinstance(node, ast.Name):
            if node.id in _OTHER_WORDS:
                raise self._refused(node, f"is written {_OTHER_WORDS[node.id]}")
            return node.id
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "field":
            arguments = node.args
            if len(arguments) == 1 and not node.keywords and isinstance(arguments[0], ast.Constant):
                name = arguments[0].value
                if isinstance(name, str) and name:
                    return name
            raise self._refused(node, "should name one field in quotes: field('publication year')")
        return None

    def _values(self, node: ast.expr) -> tuple[Any, ...]:
        if not isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            raise self._refused(node, "follows `in` and should be a list of values: lang in ['en', 'de']")
        return tuple(self._value(item) for item in node.elts)

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, type(None))):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            number = node.operand.value if isinstance(node.operand, ast.Constant) else None
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                return -number if isinstance(node.op, ast.USub) else number
        if self._name(node) is not None:
            raise self._refused(node, "stands where a value should; text is written in quotes")
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            raise self._refused(node, "is a list; test it with in: lang in ['en', 'de']")
        raise self._refused(node, f"is {_what(node)}; expected a field, a number, a text in quotes, True or False")

    def _refused(self, node: ast.expr, why: str) -> ConfigError:
        return ConfigError(f"{self._where(node)} {why}. {_GUIDE}")

    def _where(self, node: ast.expr) -> str:
        source = ast.get_source_segment(f"({self._text}\n)", node) or ""
        line = f"({self._text}".split("\n")[node.lineno - 1]
        column = len(line.encode()[: node.col_offset].decode(errors="ignore"))
        return f"filter {self._text!r:.300}, {_place(self._text, node.lineno, column)}: {source!r:.80}"


def _place(text: str, line: int, column: int) -> str:
    """`character 7`, or `line 2, character 3` where there are several lines; `column` counts characters from 0."""
    if line > text.count("\n") + 1:
        return "at its end"
    # The parenthesis that was put before the text is a character of its first line.
    character = max(1, column + (line > 1))
    return f"character {character}" if "\n" not in text else f"line {line}, character {character}"


def _hint(text: str) -> str:
    """What a slip in the grammar most often is."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "''", text)
    if re.search(r"(?<![=!<>])=(?!=)", bare):
        return "; equality is written =="
    words = re.findall(r"\w+", bare)
    for word in words:
        if word.lower() in _OURS and word not in _OURS or bare.count("&&") or bare.count("||"):
            return "; write and, or, not, in and is in lower case"
        if keyword.iskeyword(word) and word not in _OURS:
            return f"; a field of that name is written field({word!r})"
    return ""


_WHATS: tuple[tuple[type[ast.AST], Callable[[Any], str]], ...] = (
    (ast.Call, lambda node: "a call"),
    (ast.Attribute, lambda node: f"a part of something (.{node.attr}; a dotted name is written field('a.b'))"),
    (ast.Subscript, lambda node: "a part of something ([…])"),
    (ast.BinOp, lambda node: "a calculation"),
    (ast.UnaryOp, lambda node: "a calculation"),
    (ast.JoinedStr, lambda node: "an f-string"),
    (ast.Constant, lambda node: f"of the type {type(node.value).__name__}"),
)


def _what(node: ast.AST) -> str:
    return next((name(node) for kind, name in _WHATS if isinstance(node, kind)), f"a {type(node).__name__}")
