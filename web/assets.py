"""Static files: our own, the vendored ones, and plotly.js from the installed plotly wheel."""

import hashlib
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC_DIR = Path(__file__).parent / "static"
PLOTLY = "vendor/plotly.min.js"


@cache
def plotly_path() -> Path:
    """plotly.js in the wheel; found without importing plotly, which takes long."""
    spec = find_spec("plotly")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"


@cache
def plotly_style_ids() -> tuple[str, ...]:
    """Ids of style elements that plotly.js would add to the page unless elements with these ids are there already.

    The Content-Security-Policy forbids styles from scripts, and they are for maps, which we do not draw.
    """
    text = plotly_path().read_text(encoding="utf-8")
    return tuple(dict.fromkeys(re.findall(r'getElementById\("([0-9a-f]{64})"\)', text)))


@cache
def static_url(name: str) -> str:
    """A static file's address with a digest of its content, so that browsers may keep it for ever."""
    path = plotly_path() if name == PLOTLY else STATIC_DIR / name
    return f"/static/{name}?v={hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


class Assets(StaticFiles):
    """The static files. An address with a digest is cached for good, one without is asked about each time."""

    def __init__(self) -> None:
        super().__init__(directory=STATIC_DIR)

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        if path.replace(os.sep, "/") == PLOTLY:
            return str(plotly_path()), plotly_path().stat()
        return super().lookup_path(path)

    def file_response(self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope,
                      status_code: int = 200) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        versioned = "v" in QueryParams(scope["query_string"])
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if versioned else "no-cache"
        return response
