"""Makes the page of settings from settings.py: names, defaults, limits and meanings.

It reads the file with ast, so building the site needs no package that the product imports.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Setting:
    """One setting. `name` is dotted, as for `--set`. `kind`, `default` and `limits` are texts for people."""

    name: str
    kind: str
    default: str
    limits: str
    meaning: str


def settings_page(source: str) -> str:
    """Markdown: a heading for each section and each setting of settings.py."""
    tree = ast.parse(source)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    lines: list[str] = []
    for field in _fields(classes["Settings"]):
        section = classes[ast.unparse(field.annotation)]
        assert isinstance(field.target, ast.Name)
        lines += [f"## {field.target.id}", "", ast.get_docstring(section) or "", ""]
        for setting in _settings(field.target.id, section):
            told = [
                f"{setting.kind[0].upper()}{setting.kind[1:]}; default {setting.default}",
                *([setting.limits] if setting.limits else []),
            ]
            lines += [
                f"### `{setting.name}` {{ #{setting.name} }}",
                "",
                setting.meaning,
                "",
                f"{', '.join(told)}.",
                "{: .facts }",
                "",
            ]
    return "\n".join(lines)


def _settings(prefix: str, section: ast.ClassDef) -> Iterator[Setting]:
    meanings = _meanings(section)
    for field in _fields(section):
        assert isinstance(field.target, ast.Name)
        name = field.target.id
        default, limits = _default_and_limits(field.value)
        yield Setting(f"{prefix}.{name}", _kind(field.annotation), default, limits, meanings.get(name, ""))


def _fields(node: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    return (entry for entry in node.body if isinstance(entry, ast.AnnAssign))


def _meanings(node: ast.ClassDef) -> dict[str, str]:
    """Field -> the docstring under it. A docstring under several fields in a row is for all of them."""
    found: dict[str, str] = {}
    waiting: list[str] = []
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            waiting.append(entry.target.id)
        elif isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant) and waiting:
            found.update(dict.fromkeys(waiting, inspect.cleandoc(str(entry.value.value))))
            waiting = []
        else:
            waiting = []
    return found


def _default_and_limits(value: ast.expr | None) -> tuple[str, str]:
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "Field":
        return _shown(value), ""
    given = {keyword.arg or "": keyword.value for keyword in value.keywords}
    return _shown(given.get("default", value.args[0] if value.args else None)), _limits(given)


def _limits(given: dict[str, ast.expr]) -> str:
    told = [f"{words} {_shown(given[bound])}" for bound, words in _BOUNDS.items() if bound in given]
    return ", ".join([*told, *([f"matching {_shown(given['pattern'])}"] if "pattern" in given else [])])


def _shown(value: ast.expr | None) -> str:
    """A value as it is written for `--set`."""
    if value is None:
        return "none"
    if isinstance(value, ast.Call) and len(value.args) == 1:  # Path("runs/local")
        return _shown(value.args[0])
    if isinstance(value, ast.Constant):
        words = {"None": "none", "": "empty", "True": "`true`", "False": "`false`"}
        return words.get(str(value.value), f"`{value.value!s}`")
    return f"`{ast.unparse(value)}`".replace(" ** ", "^")


def _kind(annotation: ast.expr) -> str:
    """The values that a setting takes, in words."""
    if isinstance(annotation, ast.BinOp):
        return " or ".join(_kind(side) for side in (annotation.left, annotation.right) if ast.unparse(side) != "None")
    if isinstance(annotation, ast.Subscript):
        name, inner = ast.unparse(annotation.value), annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if name == "Literal":
            return ", ".join(_shown(part) for part in parts)
        if name == "Annotated":
            return _kind(parts[0])
        return f"several of {_kind(parts[0])}"
    words = {"int": "a whole number", "float": "a number", "str": "text", "bool": "`true` or `false`", "Path": "a path"}
    words |= {"Extension": "`mypkg.mymod:thing` or `plugin:NAME`", "Plugin": "`plugin:NAME`"}
    return words.get(ast.unparse(annotation), f"`{ast.unparse(annotation)}`")
