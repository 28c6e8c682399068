"""Templates: every value is escaped, an unknown name is an error, numbers are formatted by filters."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse

from autotune.domain.throughput import rate_unit
from web import format as fmt
from web.assets import PLOTLY, plotly_style_ids, static_url


def _breakable(name: str) -> Markup:
    """A knob's name that may be broken after its underscores."""
    return Markup("_<wbr>").join(name.split("_"))


_FILTERS: dict[str, Callable[..., str]] = {
    "significant": fmt.significant, "number_bytes": fmt.number_bytes, "rate": fmt.rate, "seconds": fmt.seconds,
    "duration": fmt.duration, "count": fmt.count, "flops": fmt.flops, "factor": fmt.factor, "percent": fmt.percent,
    "breakable": _breakable, "change": fmt.change, "knob": fmt.knob, "unit": rate_unit, "utc": fmt.utc, "ago": fmt.ago,
}


def _query(values: Mapping[str, str | None]) -> str:
    return urlencode({name: value for name, value in values.items() if value})


class Pages:
    """Renders templates to responses."""

    def __init__(self) -> None:
        self._environment = Environment(loader=PackageLoader("web"), autoescape=True, undefined=StrictUndefined,
                                        trim_blocks=True, lstrip_blocks=True)
        self._environment.filters.update(_FILTERS)
        self._environment.filters["query"] = _query
        self._environment.globals.update(static=static_url)

    def render(self, template: str, *, status: int = 200, headers: Mapping[str, str] | None = None,
               section: str = "studies", **context: Any) -> HTMLResponse:
        """A page, or a part of one.

        Args:
            section: the entry of the main menu that is marked.
        """
        values = {"section": section, "signed_in": True, "plotly_url": static_url(PLOTLY),
                  "plotly_style_ids": plotly_style_ids(), **context}
        # "same-origin" rather than the stricter default: forms then carry an Origin also where Sec-Fetch-Site is
        # missing, as under plain http by another name than localhost.
        return HTMLResponse(self._environment.get_template(template).render(values), status_code=status,
                            headers={"Referrer-Policy": "same-origin", **(headers or {})})
