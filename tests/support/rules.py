"""Rules of the code base as functions of source text: each returns what breaks the rule, in words."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True, kw_only=True)
class Module:
    """One Python file.

    Attributes:
        path: relative to the repository's root, with slashes.
    """

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> "Module":
        return cls(path=path, text=text, tree=ast.parse(text, filename=path))

    @property
    def name(self) -> str:
        """The dotted name it is imported by."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What the modules under some prefixes may import.

    Attributes:
        name: as it is called in messages.
        modules: dotted prefixes; a module belongs to the layer with the longest prefix that fits.
        may: dotted prefixes of this repository that may be imported, besides the layer itself.
        libraries: top-level names of third-party packages that may be imported.
    """

    name: str
    modules: tuple[str, ...]
    may: tuple[str, ...]
    libraries: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Import:
    target: str
    line: int
    for_types_only: bool


def load(root: Path, folders: Sequence[str]) -> list[Module]:
    """Every Python file under the folders that exist, sorted by path."""
    files = sorted(file for folder in folders for file in (root / folder).rglob("*.py")
                   if "__pycache__" not in file.parts)
    return [Module.parse(file.relative_to(root).as_posix(), file.read_text()) for file in files]


def starts_with(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def imports(module: Module, known: frozenset[str]) -> list[Import]:
    """Imports anywhere in the file, inside functions too; `from a import b` is `a.b` where that is a known module."""
    types_only = {id(node) for block in ast.walk(module.tree)
                  if isinstance(block, ast.If) and _is_type_checking(block.test)
                  for statement in block.body for node in ast.walk(statement)}
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        found += [Import(target=target, line=node.lineno, for_types_only=id(node) in types_only) for target in targets]
    return found


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING")


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    package = parts if module.is_package else parts[:-1]
    package = package[:len(package) - node.level + 1]
    return ".".join([*package, node.module] if node.module else package)


def forbidden_imports(modules: Sequence[Module], layers: Sequence[Layer], standard: frozenset[str]) -> list[str]:
    """Imports that the layers do not allow, and modules that belong to no layer."""
    known = frozenset(module.name for module in modules)
    own = {name.split(".")[0] for name in known}
    problems = []
    for module in modules:
        layer = layer_of(module.name, layers)
        if layer is None:
            problems.append(f"{module.path}: belongs to no layer")
            continue
        for found in imports(module, known):
            top = found.target.split(".")[0]
            if top in own:
                allowed = layer_of(found.target, layers) is layer or any(
                    starts_with(found.target, prefix) for prefix in layer.may)
            else:
                allowed = top in standard or top in layer.libraries
            if not allowed:
                problems.append(f"{module.path}:{found.line}: {layer.name} must not import {found.target}")
    return problems


def layer_of(name: str, layers: Sequence[Layer]) -> Layer | None:
    fitting = [(len(prefix), layer) for layer in layers for prefix in layer.modules if starts_with(name, prefix)]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def import_cycles(modules: Sequence[Module]) -> list[str]:
    """Strongly connected modules (Tarjan), imports inside functions included, imports for types only left out."""
    known = frozenset(module.name for module in modules)
    edges = {module.name: sorted({found.target for found in imports(module, known) if not found.for_types_only}
                                 & known - {module.name}) for module in modules}
    return [" -> ".join(sorted(component)) for component in _components(edges) if len(component) > 1]


def _components(edges: Mapping[str, Sequence[str]]) -> list[list[str]]:
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in edges[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            start = stack.index(name)
            components.append(stack[start:])
            del stack[start:]

    for name in edges:
        if name not in index:
            visit(name)
    return components


def long_file(module: Module, limit: int) -> list[str]:
    lines = len(module.text.splitlines())
    return [f"{module.path}: {lines} lines, at most {limit}"] if lines > limit else []


def functions(module: Module) -> Iterator[tuple[str, FunctionNode]]:
    """Every function with its dotted name inside the file, nested ones and methods included."""
    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, FunctionNode]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{prefix}{child.name}", child
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)
    yield from walk(module.tree, "")


def long_functions(module: Module, limit: int) -> list[str]:
    """Functions longer than the limit, the docstring and decorators apart."""
    problems = []
    for name, node in functions(module):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            length -= (text.end_lineno or text.lineno) - text.lineno + 1
        if length > limit:
            problems.append(f"{module.path}:{node.lineno}: {name}: {length} lines, at most {limit}")
    return problems


def deep_functions(module: Module, limit: int) -> list[str]:
    """Functions whose blocks (if, for, while, with, try, match) nest deeper than the limit; `elif` does not deepen."""
    problems = []
    for name, node in functions(module):
        depth = max((_depth(child) for child in node.body), default=0)
        if depth > limit:
            problems.append(f"{module.path}:{node.lineno}: {name}: nested {depth} deep, at most {limit}")
    return problems


def _depth(node: ast.AST) -> int:
    if isinstance(node, _SCOPES):
        return 0
    inside = [_depth(child) for child in ast.iter_child_nodes(node)]
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        otherwise = _depth(node.orelse[0])
        return max(otherwise, 1 + max((_depth(child) for child in node.body), default=0))
    return max(inside, default=0) + isinstance(node, _BLOCKS)


def wide_functions(module: Module, limit: int) -> list[tuple[str, str]]:
    """(function's name, problem) of functions with more parameters than the limit; self and cls apart."""
    problems = []
    for name, node in functions(module):
        arguments = node.args
        count = sum(argument.arg not in ("self", "cls") for argument in (
            *arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
        if count > limit:
            problems.append((name, f"{module.path}:{node.lineno}: {name}: {count} parameters, at most {limit}"))
    return problems


def broad_excepts(module: Module) -> list[tuple[str, str]]:
    """(function's name, place) of handlers that catch everything and do not end in raising it again."""
    inside = {id(node): name for name, function in functions(module) for node in ast.walk(function)}
    problems = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _raises_again(node):
            name = inside.get(id(node), "<module>")
            problems.append((name, f"{module.path}:{node.lineno}: {name} catches everything"))
    return problems


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(element) for element in caught.elts)
    return caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def prints(module: Module) -> list[str]:
    return [f"{module.path}:{node.lineno}: print" for node in ast.walk(module.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"]


def names_bound_to(module: Module, name: str) -> list[str]:
    """Variables and parameters of that name; imports are not counted."""
    problems = []
    for node in ast.walk(module.tree):
        variable = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name
        parameter = isinstance(node, ast.arg) and node.arg == name
        if variable or parameter:
            problems.append(f"{module.path}:{node.lineno}: a variable named {name}")  # type: ignore[attr-defined]
    return problems


def packages_without_init(folder: Path) -> list[str]:
    """Folders under `folder`, itself included, that hold Python files but no __init__.py."""
    holding = {file.parent for file in folder.rglob("*.py")}
    return [f"{path}: no __init__.py" for path in sorted(holding) if not (path / "__init__.py").exists()]


# Put together from pieces, so that this file does not break the rule itself.
LEFTOVERS: dict[str, re.Pattern[str]] = {
    "a note of work left undone": re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b"),
    "a path of one machine": re.compile(r"(?<![\w.])/(work|root|home)/\w"),
    "a merge conflict": re.compile(r"^(<{7} |>{7} |={7}$)", re.MULTILINE),
}


def leftovers(path: str, text: str) -> list[str]:
    """Unfinished notes, absolute paths of a developer's machine, conflict markers."""
    problems = []
    for what, pattern in LEFTOVERS.items():
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            problems.append(f"{path}:{line}: {what}: {match.group()}")
    return problems
