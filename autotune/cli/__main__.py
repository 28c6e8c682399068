"""``python -m autotune.cli`` is ``autotune``."""

from autotune.cli import main

main()
