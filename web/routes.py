"""The dashboard's pages. Each handler asks the service, makes a view value and renders it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from autotune.domain.errors import ConflictError, ExportError, NotFoundError
from autotune.domain.study import Study, StudyState
from autotune.service.api.parameters import StudyId, TrialNumber
from autotune.service.auth import SESSION_COOKIE, clear_session_cookie, set_session_cookie
from autotune.service.problems import Problem
from autotune.service.state import Services, ServicesDep
from web import charts
from web.contexts import memory_limit, study_page, study_row, trial_page
from web.plan_view import SHOWN_BEFORE_A_SEARCH, PlanView, plan_view
from web.rendering import Pages
from web.trials_view import TableView, trials_table
from web.why import why_view

router = APIRouter(include_in_schema=False)

PAGE_SIZE = 25
MAX_LOG_CHARACTERS = 100_000
"""Of a log, so much is put on the page; the API has all of it."""


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """What the pages need besides the service.

    Attributes:
        clock: tells the time, aware.
        plans: plan views by study: a plan does not change once it is made, and may be large in the store.
    """

    pages: Pages
    clock: Callable[[], datetime]
    plans: dict[str, PlanView] = field(default_factory=dict)

    def plan(self, services: Services, study: Study) -> PlanView | None:
        """The study's plan, if there is one yet."""
        if study.id not in self.plans:
            try:
                plan = services.queries.plan(study.id)
            except ConflictError:
                return None
            while len(self.plans) >= 200:
                self.plans.pop(next(iter(self.plans)))
            self.plans[study.id] = plan_view(plan)
        return self.plans[study.id]


def get_dashboard(request: Request) -> Dashboard:
    dashboard: Dashboard = request.app.state.dashboard
    return dashboard


DashboardDep = Annotated[Dashboard, Depends(get_dashboard)]


# Logging in and out


@router.get("/login")
def login_page(dashboard: DashboardDep, next: str = "/") -> Response:
    return dashboard.pages.render("login.html", signed_in=False, next=safe_target(next), error=None)


async def _form(request: Request) -> dict[str, list[str]]:
    form = await request.form()
    fields: dict[str, list[str]] = {}
    for name, value in form.multi_items():
        if isinstance(value, str):
            fields.setdefault(name, []).append(value)
    return fields


FormDep = Annotated[dict[str, list[str]], Depends(_form)]


@router.post("/login")
def log_in(request: Request, form: FormDep, services: ServicesDep, dashboard: DashboardDep) -> Response:
    target = safe_target(form.get("next", ["/"])[0])
    session = services.auth.log_in(form.get("token", [""])[0].strip())
    if session is None:
        return dashboard.pages.render("login.html", status=401, signed_in=False, next=target,
                                      error="This is not the token. It has no spaces and is case-sensitive.")
    response = RedirectResponse(target, status_code=303)
    set_session_cookie(response, session, request)
    return response


@router.post("/logout")
def log_out(request: Request, services: ServicesDep) -> Response:
    session = request.cookies.get(SESSION_COOKIE)
    if session is not None:
        services.auth.log_out(session)
    response = RedirectResponse("/login", status_code=303)
    clear_session_cookie(response)
    return response


def safe_target(target: str) -> str:
    """A path on this service, whatever was asked for: never another host."""
    if not target.startswith("/") or target.startswith(("//", "/\\")) or not target.isprintable():
        return "/"
    return target


# Studies


def _list_context(services: Services, dashboard: Dashboard, state: StudyState | None,
                  cursor: str | None) -> dict[str, Any]:
    page = services.queries.studies(state=state, cursor=cursor, limit=PAGE_SIZE)
    rows = tuple(study_row(study) for study in page.items)
    query = {"state": state.value if state else None, "cursor": cursor}
    return {"rows": rows, "next_cursor": page.next_cursor, "cursor": cursor, "state": state.value if state else None,
            "states": [state.value for state in StudyState], "now": dashboard.clock(),
            "query": "&".join(f"{name}={value}" for name, value in query.items() if value),
            "active": any(not study.state.is_final for study in page.items)}


Cursor = Annotated[str | None, Query(max_length=200)]


def _known_state(state: str = "") -> StudyState | None:
    """A filter from a link; an unknown one shows everything."""
    return StudyState(state) if state in list(StudyState) else None


KnownState = Annotated[StudyState | None, Depends(_known_state)]


@router.get("/")
def studies(services: ServicesDep, dashboard: DashboardDep, state: KnownState, cursor: Cursor = None) -> Response:
    return dashboard.pages.render("studies.html", **_list_context(services, dashboard, state, cursor))


@router.get("/studies/list")
def studies_list(services: ServicesDep, dashboard: DashboardDep, state: KnownState, cursor: Cursor = None) -> Response:
    return dashboard.pages.render("studies_list.html", **_list_context(services, dashboard, state, cursor))


def _study_context(request: Request, study_id: str, services: Services, dashboard: Dashboard) -> dict[str, Any]:
    # the event's id first: what happens between the reads is then told again rather than missed
    last_event = services.queries.last_event_id(study_id)
    study = services.queries.study(study_id)
    trials = services.queries.trials(study_id)
    view = TableView.from_query(request.query_params)
    now = dashboard.clock()
    page = study_page(study, trials, plan=dashboard.plan(services, study))
    elapsed = page.progress.elapsed_seconds
    if page.live and study.started_at is not None:
        elapsed = (now - study.started_at).total_seconds()
    explained = study.state is StudyState.SUCCEEDED and study.best is not None
    return {"page": page, "now": now, "shown_rows": SHOWN_BEFORE_A_SEARCH,
            "why": why_view(services.queries.explanation(study_id)) if explained else None,
            "elapsed": max(elapsed, 0.0), "formats": services.queries.export_formats(),
            "events_url": f"/api/v1/studies/{study.id}/events?last_event_id={last_event}",
            "table": trials_table(trials, view, best_number=page.best.trial_number if page.best else None,
                                  winner=study.best)}


def _live_part(context: dict[str, Any]) -> str:
    """The template of the page's changing part."""
    return "plan_live.html" if context["page"].only_plans else "study_live.html"


@router.get("/studies/{study_id}/live")
def study_live(request: Request, study_id: StudyId, services: ServicesDep, dashboard: DashboardDep) -> Response:
    """The study page's changing part, for a swap; the address bar follows the table's view."""
    context = _study_context(request, study_id, services, dashboard)
    query = context["table"].view.query()
    address = f"/studies/{study_id}" + (f"?{query}" if query else "")
    shown = request.headers.get("hx-current-url", "").partition("#")[0]
    headers = {} if shown.endswith(address) else {"HX-Replace-Url": address}
    return dashboard.pages.render(_live_part(context), headers=headers, **context)


@router.post("/studies/{study_id}/cancel")
def cancel(study_id: StudyId, services: ServicesDep) -> Response:
    with suppress(ConflictError):  # it ended meanwhile: its page says so
        services.commands.cancel(study_id)
    return RedirectResponse(f"/studies/{study_id}", status_code=303)


@router.post("/studies/{study_id}/delete")
def delete(study_id: StudyId, services: ServicesDep, dashboard: DashboardDep) -> Response:
    services.commands.delete(study_id)
    dashboard.plans.pop(study_id, None)
    return RedirectResponse("/", status_code=303)


@router.get("/studies/{study_id}/charts/history")
def history_chart(study_id: StudyId, services: ServicesDep) -> Response:
    return JSONResponse(charts.history(services.queries.trials(study_id)))


@router.get("/studies/{study_id}/charts/memory")
def memory_chart(study_id: StudyId, services: ServicesDep) -> Response:
    study = services.queries.study(study_id)
    return JSONResponse(charts.throughput_against_memory(
        services.queries.trials(study_id), limit_bytes=memory_limit(study),
        best_number=study.best.trial_number if study.best else None))


Row = Annotated[int | None, Query(ge=1, le=1000)]


@router.get("/studies/{study_id}/export/{format}")
def export(request: Request, study_id: StudyId, format: str, services: ServicesDep,
           dashboard: DashboardDep, row: Row = None) -> Response:
    """The winner, or a row of a plan, in one format: a part of the study page for htmx, a page of its own otherwise."""
    template = "export_file.html" if request.headers.get("hx-request") else "export.html"
    context: dict[str, Any] = {"format": format, "study_id": study_id, "row": row, "file": None, "problem": None}
    try:
        context["file"] = services.queries.export(study_id, format, row)
    except ExportError as error:
        context["problem"] = str(error)
    return dashboard.pages.render(template, **context)


@router.get("/studies/{study_id}/export/{format}/download")
def download(study_id: StudyId, format: str, services: ServicesDep, row: Row = None) -> Response:
    file = services.queries.export(study_id, format, row)
    return Response(file.text, media_type=file.media_type,
                    headers={"Content-Disposition": f'attachment; filename="{file.filename}"'})


# Trials


def _trial_context(study_id: str, number: int, services: Services, dashboard: Dashboard) -> dict[str, Any]:
    last_event = services.queries.last_event_id(study_id)
    study = services.queries.study(study_id)
    trials = services.queries.trials(study_id)
    trial = next((trial for trial in trials if trial.number == number), None)
    if trial is None:
        raise NotFoundError(f"study {study_id} has no trial {number}")
    log = services.queries.trial_log(study_id, number)
    if len(log) > MAX_LOG_CHARACTERS:
        log = f"… (the beginning is left out; all of it: /api/v1/studies/{study_id}/trials/{number}/log)\n" + (
            log[-MAX_LOG_CHARACTERS:])
    return {"page": trial_page(study, trial, trials), "log": log, "live": not study.state.is_final,
            "limit_bytes": memory_limit(study),
            "events_url": f"/api/v1/studies/{study.id}/events?last_event_id={last_event}"}


@router.get("/studies/{study_id}/trials/{number}")
def trial(study_id: StudyId, number: TrialNumber, services: ServicesDep, dashboard: DashboardDep) -> Response:
    return dashboard.pages.render("trial.html", **_trial_context(study_id, number, services, dashboard))


@router.get("/studies/{study_id}/trials/{number}/live")
def trial_live(study_id: StudyId, number: TrialNumber, services: ServicesDep, dashboard: DashboardDep) -> Response:
    return dashboard.pages.render("trial_live.html", **_trial_context(study_id, number, services, dashboard))


@router.get("/studies/{study_id}/trials/{number}/charts/steps")
def steps_chart(study_id: StudyId, number: TrialNumber, services: ServicesDep) -> Response:
    return JSONResponse(charts.step_times(services.queries.trial(study_id, number)))


@router.get("/studies/{study_id}/trials/{number}/charts/losses")
def losses_chart(study_id: StudyId, number: TrialNumber, services: ServicesDep) -> Response:
    return JSONResponse(charts.losses(services.queries.trial(study_id, number)))


# Models and hardware


@router.get("/models")
def models(services: ServicesDep, dashboard: DashboardDep) -> Response:
    found = [(model, services.queries.best_for_model(model.name)) for model in services.queries.models()]
    return dashboard.pages.render("models.html", section="models", models=found, now=dashboard.clock())


@router.get("/hardware")
def hardware(services: ServicesDep, dashboard: DashboardDep) -> Response:
    view = services.queries.hardware()
    names: dict[str, str] = {}
    for device in view.devices:
        if device.study_id is not None and device.study_id not in names:
            names[device.study_id] = _name_of(services, device.study_id)
    return dashboard.pages.render("hardware.html", section="hardware", hardware=view, names=names,
                                  now=dashboard.clock())


def _name_of(services: Services, study_id: str) -> str:
    try:
        return services.queries.study(study_id).request.name
    except NotFoundError:
        return study_id


@router.get("/studies/{study_id}")
def study(request: Request, study_id: StudyId, services: ServicesDep, dashboard: DashboardDep) -> Response:
    context = _study_context(request, study_id, services, dashboard)
    return dashboard.pages.render("study.html", live_part=_live_part(context), **context)


def error_page(request: Request, problem: Problem) -> Response:
    """An error for a browser."""
    dashboard = get_dashboard(request)
    public = request.app.state.services.auth.is_public(request.scope["path"])
    return dashboard.pages.render("error.html", status=problem.status, section="", signed_in=not public,
                                  title=problem.title, detail=problem.detail)
