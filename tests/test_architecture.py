"""The rules of the code base. Every exception is listed in this file, with its reason."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import rules
from tests.support.rules import Layer, Module

ROOT = Path(__file__).parents[1]

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_NESTING = 4
MAX_PARAMETERS = 6

SOURCE = ("engine", "autotune", "web")
ALL_CODE = (*SOURCE, "tests", "examples", "benchmarks", "docs", "alembic")

CONTRACT = ("engine.config", "engine.errors", "engine.process", "engine.profile", "engine.report", "engine.run_file",
            "engine.spec", "engine.statistics", "engine.values", "engine.wire")
"""The engine's contract: frozen values that every process shares, and what a rank and its launcher must agree on (the
wire, the operating system's view of a process). Loads no torch."""

LAYERS = (
    Layer(name="the engine's contract", modules=CONTRACT, may=(), libraries=frozenset({"pydantic", "pydantic_core"})),
    Layer(name="the engine", modules=("engine",), may=CONTRACT,
          libraries=frozenset({"torch", "numpy", "pydantic", "transformers", "safetensors"})),
    Layer(name="autotune.domain", modules=("autotune", "autotune.domain"), may=CONTRACT,
          libraries=frozenset({"pydantic"})),
    Layer(name="autotune.predict", modules=("autotune.predict",), may=("autotune.domain", *CONTRACT),
          libraries=frozenset({"numpy", "pydantic"})),
    Layer(name="autotune.search", modules=("autotune.search",), may=("autotune.domain", "autotune.predict", *CONTRACT),
          libraries=frozenset({"optuna", "numpy", "scipy", "pydantic"})),
    Layer(name="autotune.export", modules=("autotune.export",), may=("autotune.domain", *CONTRACT),
          libraries=frozenset({"yaml"})),
    Layer(name="autotune.importing", modules=("autotune.importing",), may=("autotune.domain", *CONTRACT),
          libraries=frozenset({"pydantic"})),
    Layer(name="autotune.store", modules=("autotune.store",), may=("autotune.domain", *CONTRACT),
          libraries=frozenset({"sqlalchemy", "alembic", "pydantic"})),
    Layer(name="autotune.scheduler", modules=("autotune.scheduler",),
          may=("autotune.domain", "autotune.store", "autotune.search", "autotune.predict", *CONTRACT),
          libraries=frozenset({"pydantic"})),
    Layer(name="autotune.service", modules=("autotune.service",),
          may=("autotune.domain", "autotune.store", "autotune.search", "autotune.export", "autotune.settings",
               *CONTRACT),
          libraries=frozenset({"fastapi", "starlette", "pydantic", "prometheus_client"})),
    Layer(name="autotune.settings", modules=("autotune.settings",), may=("autotune.domain", *CONTRACT),
          libraries=frozenset({"pydantic", "pydantic_settings"})),
    Layer(name="autotune.client", modules=("autotune.client",),
          may=("autotune.domain", "autotune.service.schemas", *CONTRACT),
          libraries=frozenset({"httpx", "pydantic"})),
    Layer(name="web", modules=("web",), may=("autotune.service", "autotune.domain", *CONTRACT),
          libraries=frozenset({"fastapi", "starlette", "jinja2", "markupsafe", "plotly", "pydantic"})),
    Layer(name="a composition root", modules=("autotune.cli", "autotune.asgi"), may=("autotune", "engine", "web"),
          libraries=frozenset({"typer", "rich", "uvicorn", "fastapi", "httpx", "pydantic", "yaml"})),
)

BROAD_EXCEPTS = {
    "engine/worker.py": "the worker's entry: every failure of a request becomes a typed report",
    "autotune/scheduler/loop.py": "the scheduler's loop: one study's failure must not end the others",
}

MANY_PARAMETERS: dict[tuple[str, str], str] = {
    ("autotune/cli/plan.py", "plan"): "one parameter for each option of the command line, as typer wants it",
    ("autotune/cli/studies.py", "export"): "one parameter for each option of the command line, as typer wants it",
    ("autotune/cli/serve.py", "serve"): "one parameter for each option of the command line, as typer wants it",
}
"""(path, function) -> reason."""

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[tuple[str, str], str] = {
    ("alembic/versions/0001_first_schema.py", "upgrade"): "a migration is a list of tables, written once",
}

MAY_PRINT = ("examples/", "benchmarks/", "docs/", "tests/")
"""Scripts for people; everything else writes through rich or logging."""

NOT_OUR_TEXT = ("web/static/vendor/",)
"""Files of other projects, kept as they came."""

TEXT_SUFFIXES = (".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".html", ".css", ".js", ".sh", ".mako", "")


@pytest.fixture(scope="module")
def source() -> list[Module]:
    return rules.load(ROOT, SOURCE)


@pytest.fixture(scope="module")
def code() -> list[Module]:
    return rules.load(ROOT, ALL_CODE)


def assert_none(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


# --- imports ---------------------------------------------------------------------------------------------------------


def test_packages_import_only_what_their_layer_allows(source: list[Module]) -> None:
    assert_none(rules.forbidden_imports(source, LAYERS, frozenset(sys.stdlib_module_names)))


def test_no_import_cycle(source: list[Module]) -> None:
    assert_none(rules.import_cycles(source))


def test_the_library_names_in_the_layers_are_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["huggingface"]]
    names = {re.split(r"[\[<>=!~ ]", line)[0].lower().replace("-", "_") for line in declared}
    # What comes with a declared one: starlette with fastapi, markupsafe with jinja2, pydantic_core with pydantic.
    names |= {"yaml", "starlette", "markupsafe", "pydantic_core"}
    used = {library for layer in LAYERS for library in layer.libraries}
    assert used <= names


_IMPORT_WITHOUT_TORCH = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'torch':
            raise ImportError('torch is blocked in this process')
sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_everything_but_the_engines_inside_loads_without_torch(source: list[Module]) -> None:
    names = ["engine", *(module.name for module in source
                         if not module.name.endswith("__main__") and (
                             module.name in CONTRACT or module.name.split(".")[0] in ("autotune", "web")))]
    done = subprocess.run([sys.executable, "-c", _IMPORT_WITHOUT_TORCH, *names], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_blocker_of_torch_blocks() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORT_WITHOUT_TORCH, "torch"], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode != 0
    assert "torch is blocked" in done.stderr


# --- size ------------------------------------------------------------------------------------------------------------


def test_files_are_short(code: list[Module]) -> None:
    assert_none([problem for module in code if module.path not in LONG_FILES
                 for problem in rules.long_file(module, MAX_FILE_LINES)])


def test_functions_are_short(code: list[Module]) -> None:
    assert_none([problem for module in code for problem in rules.long_functions(module, MAX_FUNCTION_LINES)
                 if (module.path, problem.split(": ")[1]) not in LONG_FUNCTIONS])


def test_blocks_are_not_nested_deep(code: list[Module]) -> None:
    assert_none([problem for module in code for problem in rules.deep_functions(module, MAX_NESTING)])


def test_functions_take_few_parameters(source: list[Module]) -> None:
    assert_none([problem for module in source for name, problem in rules.wide_functions(module, MAX_PARAMETERS)
                 if (module.path, name) not in MANY_PARAMETERS])


# --- habits ----------------------------------------------------------------------------------------------------------


def test_only_the_named_places_catch_everything(source: list[Module]) -> None:
    assert_none([place for module in source if module.path not in BROAD_EXCEPTS
                 for _, place in rules.broad_excepts(module)])


def test_only_scripts_print(code: list[Module]) -> None:
    assert_none([problem for module in code if not module.path.startswith(MAY_PRINT)
                 for problem in rules.prints(module)])


def test_no_variable_hides_the_engine_package(code: list[Module]) -> None:
    assert_none([problem for module in code for problem in rules.names_bound_to(module, "engine")])


def test_test_folders_are_packages_and_alembic_is_not() -> None:
    assert_none(rules.packages_without_init(ROOT / "tests"))
    # alembic/__init__.py would shadow the library of that name.
    assert not list((ROOT / "alembic").rglob("__init__.py"))


def test_no_leftovers_in_the_repositorys_text() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: nothing says which files are the repository's")
    problems = []
    for path in listed.stdout.splitlines():
        file = ROOT / path
        if path.startswith(NOT_OUR_TEXT) or file.suffix not in TEXT_SUFFIXES or not file.exists():
            continue
        problems += rules.leftovers(path, file.read_text())
    assert_none(problems)


def test_exceptions_name_what_exists() -> None:
    listed = {*BROAD_EXCEPTS, *LONG_FILES, *(path for path, _ in (*MANY_PARAMETERS, *LONG_FUNCTIONS))}
    assert {path for path in listed if not (ROOT / path).exists()} == set()


# --- the rules themselves ---------------------------------------------------------------------------------------------


def parse(text: str, path: str = "pkg/a.py") -> Module:
    return Module.parse(path, text)


LOW = Layer(name="low", modules=("pkg.low",), may=(), libraries=frozenset({"pydantic"}))
HIGH = Layer(name="high", modules=("pkg",), may=("pkg.low",), libraries=frozenset())


@pytest.mark.parametrize(("path", "text", "expected"), [
    ("pkg/low.py", "import pkg.high", "pkg/low.py:1: low must not import pkg.high"),
    ("pkg/low.py", "from pkg import high", "pkg/low.py:1: low must not import pkg.high"),
    ("pkg/low.py", "from . import high", "pkg/low.py:1: low must not import pkg.high"),
    ("pkg/low.py", "from .high import x", "pkg/low.py:1: low must not import pkg.high"),
    ("pkg/low.py", "def f():\n    import torch", "pkg/low.py:2: low must not import torch"),
    ("pkg/low.py", "if TYPE_CHECKING:\n    import torch.nn", "pkg/low.py:2: low must not import torch.nn"),
    ("other/x.py", "", "other/x.py: belongs to no layer"),
])
def test_a_forbidden_import_is_found(path: str, text: str, expected: str) -> None:
    modules = [parse("", "pkg/__init__.py"), parse("", "pkg/high.py"), parse(text, path)]
    assert rules.forbidden_imports(modules, (LOW, HIGH), frozenset({"os"})) == [expected]


def test_allowed_imports_are_not_reported() -> None:
    modules = [parse("import os, pydantic", "pkg/low.py"),
               parse("from pkg.low import x\nfrom . import other", "pkg/high.py"),
               parse("", "pkg/other.py"), parse("", "pkg/__init__.py")]
    assert rules.forbidden_imports(modules, (LOW, HIGH), frozenset({"os"})) == []


def test_a_cycle_through_a_function_is_found_and_one_through_types_is_not() -> None:
    a = parse("from pkg import b", "pkg/a.py")
    b = parse("def f():\n    import pkg.c", "pkg/b.py")
    c = parse("from pkg.a import x", "pkg/c.py")
    assert rules.import_cycles([a, b, c]) == ["pkg.a -> pkg.b -> pkg.c"]
    c = parse("if TYPE_CHECKING:\n    from pkg.a import x", "pkg/c.py")
    assert rules.import_cycles([a, b, c]) == []


def test_length_leaves_the_docstring_out() -> None:
    body = "    x = 1\n" * 3
    text = f'def f():\n    """One\n    two\n    three."""\n{body}'
    assert rules.long_functions(parse(text), 4) == []
    assert rules.long_functions(parse(text), 3) == ["pkg/a.py:1: f: 4 lines, at most 3"]
    assert rules.long_file(parse("x = 1\n" * 5), 4) == ["pkg/a.py: 5 lines, at most 4"]
    assert rules.long_file(parse("x = 1\n" * 4), 4) == []


def test_depth_counts_blocks_but_not_elif_and_inner_functions_apart() -> None:
    deep = ("def f():\n  for a in b:\n    with c:\n      try:\n        if d:\n          while e:\n            pass\n"
            "      finally:\n        pass")
    assert rules.deep_functions(parse(deep), 4) == ["pkg/a.py:1: f: nested 5 deep, at most 4"]
    chain = "def f():\n  if a: pass\n  elif b: pass\n  elif c: pass\n  else:\n    if d: pass\n    x = 1"
    assert rules.deep_functions(parse(chain), 1) == ["pkg/a.py:1: f: nested 2 deep, at most 1"]
    inner = "def f():\n  if a:\n    def g():\n      if b: pass"
    assert rules.deep_functions(parse(inner), 1) == []


def test_parameters_are_counted_without_self() -> None:
    text = "class A:\n    def f(self, a, /, b, *, c, **rest): pass"
    assert rules.wide_functions(parse(text), 3) == []
    assert rules.wide_functions(parse(text), 2) == [("A.f", "pkg/a.py:2: A.f: 3 parameters, at most 2")]


@pytest.mark.parametrize("caught", ["", " Exception", " BaseException", " (ValueError, Exception)", " Exception as e"])
def test_a_broad_except_is_found(caught: str) -> None:
    text = f"def f():\n    try:\n        pass\n    except{caught}:\n        pass"
    assert rules.broad_excepts(parse(text)) == [("f", "pkg/a.py:4: f catches everything")]


@pytest.mark.parametrize("handler", ["except (ValueError, OSError):\n    pass",
                                     "except BaseException:\n    clean_up()\n    raise"])
def test_a_narrow_except_and_one_that_raises_again_are_not_reported(handler: str) -> None:
    assert rules.broad_excepts(parse(f"try:\n    pass\n{handler}")) == []


@pytest.mark.parametrize("text", ["engine = 1", "def f(engine): 0", "for engine in x: 0", "with a as engine: 0"])
def test_a_variable_of_a_packages_name_is_found(text: str) -> None:
    assert len(rules.names_bound_to(parse(text), "engine")) == 1
    assert rules.names_bound_to(parse("import engine\nself.engine = engine.x"), "engine") == []


def test_a_print_is_found() -> None:
    assert rules.prints(parse("console.print(1)\nprint(2)")) == ["pkg/a.py:2: print"]


@pytest.mark.parametrize("text", ["x  # TO" + "DO: later", "see /ro" + "ot/data", "/ho" + "me/me/x", "<" * 7 + " HEAD"])
def test_a_leftover_is_found(text: str) -> None:
    assert len(rules.leftovers("a.md", "fine\n" + text)) == 1
    assert rules.leftovers("a.md", "fine\n" + text)[0].startswith("a.md:2: ")


@pytest.mark.parametrize("text", ["a framework/home/x", "the root of / is", "~/work", "https://x.org/home/y", "=== a"])
def test_ordinary_text_is_no_leftover(text: str) -> None:
    assert rules.leftovers("a.md", text) == []


def test_a_folder_without_init_is_found(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "__init__.py").touch()
    (tmp_path / "a" / "b" / "test_x.py").touch()
    assert rules.packages_without_init(tmp_path) == [f"{tmp_path / 'a' / 'b'}: no __init__.py"]
