"""Measures every Python process that has this folder on its path: Python imports a module of this name at its start.

Worker processes too, in whose environment the launcher leaves little but the path.
"""

import os
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]

os.environ["COVERAGE_PROCESS_START"] = str(ROOT / "pyproject.toml")
os.environ["COVERAGE_FILE"] = str(ROOT / ".coverage")
coverage.process_startup()
