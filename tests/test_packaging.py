"""What is installed: ranges in pyproject.toml, tested releases in constraints.txt."""

import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def requirements() -> list[Requirement]:
    loaded = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = loaded["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra),
             *(line for group in loaded["dependency-groups"].values() for line in group)]
    return [Requirement(line) for line in lines]


@pytest.fixture(scope="module")
def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(pin) for name, _, pin in (line.partition("==") for line in lines)}


def test_every_dependency_is_pinned_inside_its_range(requirements: list[Requirement], pins: dict[str, Version]) -> None:
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pins[name]), f"{name}: {pins[name]} is outside {requirement.specifier}"


def test_nothing_is_pinned_that_is_not_a_dependency(requirements: list[Requirement], pins: dict[str, Version]) -> None:
    assert set(pins) == {canonicalize_name(requirement.name) for requirement in requirements}


def test_the_tests_run_with_the_pinned_torch(pins: dict[str, Version]) -> None:
    assert Version(version("torch")).public == pins["torch"].public


def test_makes_targets_are_the_documented_ones() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    assert re.findall(r"^make (\S+)", done.stdout, re.MULTILINE) == [
        "setup", "demo", "test", "coverage", "check", "bench-engine", "bench-NAME", "clean"]


def test_make_help_names_every_benchmark() -> None:
    (names,) = re.findall(r"^# make bench-NAME +(.+) \(", (ROOT / "Makefile").read_text(), re.MULTILINE)
    runnable = {path.parent.name if path.stem == "__main__" else path.stem
                for path in (ROOT / "benchmarks").glob("**/*.py") if "sys.exit(main())" in path.read_text()}
    assert {"engine" if name == "peers" else name for name in runnable} == {"engine", *names.split(", ")}


@pytest.mark.parametrize("page", [
    "README.md", "docs/architecture.md", "docs/engine.md", "docs/prediction.md", "docs/search.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    named = re.findall(r"`((?:engine|autotune|web|docs|examples|docker|tests|alembic)/[\w./-]*)`", text)
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert missing + [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("script", [".ci/run", ".ci/venv", ".ci/peers", ".ci/system", "docker/entrypoint"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    shell = "bash" if "bash" in path.read_text().splitlines()[0] else "sh"
    done = subprocess.run([shell, "-n", path], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
