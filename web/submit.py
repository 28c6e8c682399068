"""Submitting a study: the form, the JSON editor, and the way from one to the other."""

import json
from collections.abc import Mapping
from typing import Any, get_args

from fastapi import APIRouter
from starlette.responses import RedirectResponse, Response

from autotune.domain.errors import FieldError, InvalidRequestError
from autotune.domain.request import Sampler
from autotune.service.api.parameters import StudyId
from autotune.service.fields import parse_request
from autotune.service.state import Services, ServicesDep
from web.forms import (
    CHOICES,
    EXAMPLE,
    MEMORY_UNITS,
    PURPOSES,
    FormError,
    FormView,
    default_values,
    parse_json,
    place_errors,
    request_body,
)
from web.routes import Dashboard, DashboardDep, FormDep

router = APIRouter(include_in_schema=False)

Fields = Mapping[str, list[str]]
_MAX_DEFAULT_DEVICES = 8


@router.get("/studies/new")
def new_study(services: ServicesDep, dashboard: DashboardDep, mode: str = "form") -> Response:
    """The form, or the editor, each filled with an example."""
    devices = _default_devices(services)
    if mode == "json":
        return _editor(dashboard, _text({**EXAMPLE, "hardware": {"device": "auto", "devices": devices}}))
    return _form_page(services, dashboard, default_values() | {"hardware.devices": str(devices)}, {})


@router.get("/studies/new/from/{study_id}")
def copy_study(study_id: StudyId, services: ServicesDep, dashboard: DashboardDep) -> Response:
    """The editor with an earlier study's request."""
    request = services.queries.study(study_id).request
    return _editor(dashboard, _text(request.model_dump(mode="json", exclude_defaults=True)))


@router.post("/studies/new")
def submit(form: FormDep, services: ServicesDep, dashboard: DashboardDep) -> Response:
    """Submit; problems are shown beside their fields, with everything that was typed kept."""
    if form.get("mode") == ["json"]:
        return _submit_json(form, services, dashboard)
    values, ticked = _split(form)
    try:
        study = services.commands.submit(parse_request(request_body(values, ticked)))
    except FormError as error:
        return _form_page(services, dashboard, values, ticked, error.error)
    except InvalidRequestError as error:
        return _form_page(services, dashboard, values, ticked, *error.errors)
    return RedirectResponse(f"/studies/{study.id}", status_code=303)


@router.post("/studies/new/json")
def as_json(form: FormDep, services: ServicesDep, dashboard: DashboardDep) -> Response:
    """What the form says, in the editor."""
    values, ticked = _split(form)
    try:
        return _editor(dashboard, _text(request_body(values, ticked)))
    except FormError as error:
        return _form_page(services, dashboard, values, ticked, error.error)


def _submit_json(form: Fields, services: Services, dashboard: Dashboard) -> Response:
    text = form.get("json", [""])[0]
    try:
        study = services.commands.submit(parse_request(parse_json(text)))
    except FormError as error:
        return _editor(dashboard, text, (error.error,))
    except InvalidRequestError as error:
        return _editor(dashboard, text, error.errors)
    return RedirectResponse(f"/studies/{study.id}", status_code=303)


def _split(form: Fields) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """(text by field, ticked values by knob)."""
    values = {name: texts[-1] for name, texts in form.items() if name not in CHOICES}
    return default_values() | values, {knob: tuple(form.get(knob, ())) for knob in CHOICES}


def _form_page(services: Services, dashboard: Dashboard, values: Mapping[str, str],
               ticked: Mapping[str, tuple[str, ...]], *errors: FieldError) -> Response:
    placed, general = place_errors(errors, kind=values["kind"])
    form = FormView(values=values, ticked=ticked, errors=placed, general=general)
    return dashboard.pages.render("new_study.html", status=422 if errors else 200, form=form, knob_choices=CHOICES,
                                  samplers=get_args(Sampler), units=tuple(MEMORY_UNITS), purposes=PURPOSES,
                                  clusters=services.queries.clusters())


def _editor(dashboard: Dashboard, text: str, errors: tuple[FieldError, ...] = ()) -> Response:
    return dashboard.pages.render("new_study_json.html", status=422 if errors else 200, text=text, errors=errors)


def _text(body: Any) -> str:
    return json.dumps(body, indent=2, ensure_ascii=False)


def _default_devices(services: Services) -> int:
    """A power of two, as many as the largest host has, so that usual batch sizes divide by it."""
    largest = max((host.device_count for host in services.queries.hardware().hosts), default=1)
    return 1 << (min(max(largest, 1), _MAX_DEFAULT_DEVICES).bit_length() - 1)
