"""Who may import whom, read from the source with ast: the cores stay pure, the packages stay apart.

Imports inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from diloco_common.command import Command, installed

OURS = {
    "diloco_protos": "protos",
    "diloco_common": "common",
    "diloco_server": "server",
    "diloco_worker": "worker",
    "diloco_demo": "worker",
    "diloco_deploy": "deploy",
    "diloco_lab": "simulator",
    "diloco_planner": "simulator",
    "diloco_simulator": "simulator",
    "diloco_chaos": "simulator",
}
"""Package -> its source root."""
NODE = ("diloco_protos", "diloco_common", "diloco_server", "diloco_worker", "diloco_demo")
"""What tools build on. It knows none of them, and they do not know each other; proof may know all."""

# What a pure decision may not reach: network, threads, clocks, chance, the machine, the log, other processes.
# fmt: off
IMPURE = frozenset({
    "asyncio", "concurrent", "datetime", "http", "importlib", "io", "logging", "multiprocessing", "os",
    "pathlib", "queue", "random", "sched", "secrets", "select", "selectors", "shutil", "signal", "socket",
    "socketserver", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
    "warnings",
})
# fmt: on
PURE_STDLIB = sys.stdlib_module_names - IMPURE
"""`io`, `sys`, `warnings` and `importlib` would be ways around the rule."""
PURE_COMMON = tuple(
    f"diloco_common.{name}"
    for name in [
        "codec",
        "errors",
        "settings",
        "trust.identity",
        "wire.bounds",
        "wire.calls",
        "wire.manifest",
        "wire.messages",
    ]
)


@dataclass(frozen=True)
class Rule:
    """What the modules below a dotted name may import; the longest name that fits a module decides."""

    ours: frozenset[str]
    """Dotted names of our own that may be imported, with everything below them."""
    outside: frozenset[str] | None = None
    """Top-level names of the standard library and others that may be imported; None: any but `never`."""
    never: frozenset[str] = frozenset()
    """Dotted names that may not be imported although `ours` or `outside` would allow it."""


def allow(*ours: str, outside: frozenset[str] | None = None, never: frozenset[str] = frozenset()) -> Rule:
    return Rule(frozenset(ours), outside, never)


def core(package: str) -> Rule:
    return allow(*PURE_COMMON, f"{package}.core", outside=PURE_STDLIB | {"torch"})


TORCH = frozenset({"torch"})
CLOCKS_AND_CHANCE = frozenset({"datetime", "random", "secrets", "time", "uuid"})
NETWORK = frozenset({"grpc", "diloco_common.wire.rpc"})
PRODUCTION = frozenset({
    "cryptography", "diloco_common.observe.http", "diloco_common.observe.metrics", "diloco_common.trust.files",
    "diloco_common.wire.by_name", "diloco_common.wire.handshake",
    "diloco_common.wire.protobuf", "diloco_common.wire.rpc", "diloco_server.shell.access",
    "diloco_server.shell.health", "diloco_server.shell.server", "diloco_server.shell.servicer",
    "diloco_common.trust.credentials", "diloco_common.wire.grpc_transport", "diloco_worker.joining",
    "diloco_worker.shell.network_thread", "grpc", "secrets", "ssl", "threading", "time",
})  # fmt: skip
"""The other world: the simulator runs the shells, and nothing of this."""
RULES = {
    "diloco_protos": allow("diloco_protos", outside=frozenset({"google", "grpc"}) | sys.stdlib_module_names),
    "diloco_common": allow("diloco_common", never=TORCH),
    "diloco_common.codec": allow("diloco_common"),
    "diloco_common.wire.protobuf": allow("diloco_common", "diloco_protos", never=TORCH),
    "diloco_common.wire.by_name": allow("diloco_common", "diloco_protos", never=TORCH),
    "diloco_server": allow("diloco_server", "diloco_common", never=CLOCKS_AND_CHANCE | NETWORK),
    "diloco_server.shell.servicer": allow(
        "diloco_common",
        "diloco_protos",
        *(f"diloco_server.shell.{name}" for name in ("access", "quotas")),
        never=CLOCKS_AND_CHANCE,
    ),
    "diloco_server.shell.health": allow("diloco_server", "diloco_common", "diloco_protos", never=CLOCKS_AND_CHANCE),
    "diloco_server.shell.server": allow("diloco_server", "diloco_common", "diloco_protos"),
    "diloco_server.storage": allow(
        "diloco_server.storage", "diloco_server.core", "diloco_common", never=CLOCKS_AND_CHANCE | NETWORK
    ),
    "diloco_server.core": core("diloco_server"),
    "diloco_worker": allow("diloco_worker", "diloco_common", never=CLOCKS_AND_CHANCE | NETWORK),
    "diloco_common.wire.grpc_transport": allow("diloco_common", "diloco_protos", never=CLOCKS_AND_CHANCE | TORCH),
    "diloco_worker.joining": allow("diloco_worker", "diloco_common", never=NETWORK),
    "diloco_worker.core": core("diloco_worker"),
    "diloco_simulator": allow("diloco_simulator", "diloco_common", "diloco_server", "diloco_worker", never=PRODUCTION),
    "diloco_simulator.world.transport": allow(
        "diloco_simulator", "diloco_common", never=frozenset({"diloco_common.wire.rpc", "grpc"})
    ),
    "diloco_simulator.__main__": allow("diloco_simulator", "diloco_common"),
    "diloco_lab": allow("diloco_lab", "diloco_common", "diloco_server", "diloco_worker", "diloco_demo", never=NETWORK),
    "diloco_lab.commands": allow("diloco_lab", "diloco_common"),
    "diloco_planner": allow("diloco_planner", "diloco_common", "diloco_server", "diloco_worker", never=NETWORK),
    "diloco_deploy": allow(*NODE, "diloco_deploy"),
    "diloco_chaos": allow(*NODE, "diloco_deploy", "diloco_simulator", "diloco_chaos"),
    "diloco_demo": allow(  # as a script of a user's: what docs/api.md shows, and what commands share
        *(f"diloco_worker.{name}" for name in ("digest_of", "join", "pull_global_model", "write_model", "progress_lr")),
        "diloco_demo",
        "diloco_common",
        never=NETWORK,
    ),
}


def is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def rule_of(module: str) -> Rule:
    return RULES[max((name for name in RULES if is_below(module, name)), key=len)]


def why_not(module: str, imported: str) -> str | None:
    """Why `module` may not import `imported`; None if it may."""
    rule = rule_of(module)
    if any(is_below(imported, name) for name in rule.never):
        return f"{imported} is ruled out here"
    top = imported.partition(".")[0]
    if top in OURS:
        if any(is_below(imported, name) for name in rule.ours):
            return None
        return f"only {', '.join(sorted(rule.ours))} of our own"
    if rule.outside is not None and top not in rule.outside:
        return f"{top} is not among what may be imported here"
    return None


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports. `from a import b` gives a.b."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                up = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{up}.{base}" if base else up
            for alias in node.names:
                yield node.lineno, base if alias.name == "*" else f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "__import__":
            yield node.lineno, "importlib"


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    return [
        f"{module}:{line} imports {imported}: {reason}"
        for line, imported in imports(source, module, is_package=is_package)
        if (reason := why_not(module, imported))
    ]


def modules(repository: Path) -> Iterator[tuple[Path, str]]:
    for package, folder in OURS.items():
        for path in sorted((repository / folder / package).rglob("*.py")):
            parts = path.relative_to(repository / folder).with_suffix("").parts
            yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_module_keeps_to_its_layer(repository):
    found = []
    seen = set()
    for path, module in modules(repository):
        seen.add(module.partition(".")[0])
        found += violations(path.read_text(), module, is_package=path.name == "__init__.py")

    assert seen >= {"diloco_protos", "diloco_common"}, "the checker looked in the wrong place"
    assert not found, "\n" + "\n".join(found)


def needs(repository: Path, *, types: bool = True) -> dict[str, set[str]]:
    """Module -> modules of ours that it imports; `types`: those for types alone, too."""
    known = {module: path for path, module in modules(repository)}
    found = {}
    for module, path in known.items():
        tree = ast.parse(path.read_text())
        source = ast.unparse(tree if types else WithoutTypes().visit(tree))
        names = {name for _, name in imports(source, module, is_package=path.name == "__init__.py")}
        found[module] = {name if name in known else name.rpartition(".")[0] for name in names} & (set(known) - {module})
    return found


class WithoutTypes(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST:
        of_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return ast.Pass() if of_types else self.generic_visit(node)


def test_no_modules_import_each_other_in_a_circle(repository):
    """Also not by way of others, in functions, or for types alone."""
    left = needs(repository)
    while leaves := {module for module, needed in left.items() if not needed}:
        left = {module: needed - leaves for module, needed in left.items() if module not in leaves}
    assert not left, f"these, or some of them, import each other: {sorted(left)}"


def test_a_class_name_has_one_meaning(repository):
    """With or without an underscore. The callbacks of two libraries mean the same in both."""
    found = Counter(
        node.name.lstrip("_")
        for path, module in modules(repository) if not module.startswith("diloco_protos")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
    )  # fmt: skip
    assert [name for name, count in found.items() if count > 1] == ["DilocoCallback"]


CLUSTER = {"diloco_server.core", "diloco_server.storage", "diloco_demo", "diloco_worker.progress_lr"}
VALUES = {"diloco_server.core", "diloco_server.storage", "diloco_worker", "diloco_protos"}
LOADS: dict[str, set[str]] = {
    "up": CLUSTER, "init": CLUSTER, "resume": CLUSTER, "scale": CLUSTER,
    "status": set(), "record": set(), "web": set(), "logs": set(), "health": set(), "explain": set(),
    "certs": set(), "token": set(), "config": set(), "completion": set(),
    "doctor": {"diloco_protos", "diloco_server.shell.quotas", "diloco_server.storage.filesystem"},
    "plan": set(),
    "simulate": {"diloco_server.core", "diloco_worker.core"},
    "checkpoint": VALUES, "restore": VALUES, "export": VALUES, "pull": VALUES,
    "promote": VALUES,
    "lab": {"diloco_demo", "diloco_server", "diloco_worker"},
}  # fmt: skip
"""Command -> what of ours its module may load, also in functions, beside its own package and diloco_common."""


@pytest.fixture(scope="module")
def loaded(repository):
    return needs(repository, types=False)


@pytest.mark.parametrize("command", installed(), ids=lambda command: command.name)
def test_a_command_loads_no_more_than_it_needs(command: Command, loaded):
    at = command.at.partition(":")[0]
    seen, left = set(), {at}
    while left:
        seen |= left
        left = set().union(*(loaded[module] for module in left)) - seen
    allowed = LOADS[command.name] | {"diloco_common", at.partition(".")[0]}
    beyond = {m for m in seen if not any(is_below(m, name) or is_below(name, m) for name in allowed)}  # or its package
    assert sorted(beyond) == []
    unused = {name for name in LOADS[command.name] if not any(is_below(module, name) for module in seen)}
    assert not unused, "these are needed no more"
