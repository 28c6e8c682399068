"""Walks through the dashboard with a real browser and the real web process.

The studies are told through the store as a scheduler would; the last walk has a real scheduler. Whatever shows up on
the console (script errors, violations of the Content-Security-Policy) fails the walk: see `conftest.page`.
"""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Dialog, Page, expect

from autotune.domain.study import StudyPhase, TrialRole
from autotune.settings import Settings
from autotune.store import Database
from engine.report import Outcome, TrialReport
from tests.support.plans import plan_request
from tests.support.service import RunningService, running_service
from tests.web.conftest import Watched
from tests.web.story import Story, finished, measurement, planned, request, searched

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def submit(page: Page, **fields: str) -> str:
    """Fill in the form and send it; returns the new study's id."""
    page.goto("/studies/new")
    for name, text in fields.items():
        page.fill(f'[name="{name}"]', text)
    page.click("text=Submit study")
    page.wait_for_url(re.compile(r"/studies/[0-9a-f]{32}$"))
    return page.url.rpartition("/")[2]


def accept(dialog: Dialog) -> None:
    dialog.accept()


def first_column(page: Page) -> list[int]:
    texts = page.locator("#trials tbody td.first a").all_inner_texts()
    return [int(re.sub(r"\D", "", text)) for text in texts]


def test_log_in_submit_and_watch_trials_arrive_without_reload(page: Page, service: RunningService,
                                                               store: Database) -> None:
    page.goto("/studies/new")
    expect(page).to_have_url(re.compile(r"/login\?next=%2Fstudies%2Fnew"))
    page.fill("#token", service.token)
    page.click("button:has-text('Log in')")
    expect(page).to_have_url(f"{service.url}/studies/new")

    study_id = submit(page, name="gpt-live", **{"hardware.devices": "2"})
    expect(page.locator("h1")).to_have_text("gpt-live")
    expect(page.locator("#study-head .badge").first).to_have_text("queued")
    expect(page.locator("#trials")).to_contain_text("The first trial starts")
    page.evaluate("window.notReloaded = true")
    streams: list[str] = []
    page.on("request", lambda sent: streams.append(sent.url) if "/events" in sent.url else None)

    story = Story.adopt(store, study_id)
    story.claim()
    story.plan(total=3)
    story.phase(StudyPhase.SEARCHING)
    expect(page.locator("#study-head .badge").first).to_have_text("running")
    expect(page.locator(".phases [aria-current=step]")).to_have_text("Search")
    expect(page.locator("#plan")).to_contain_text("61 of 96")

    story.ok(0.4, 400, role=TrialRole.BASELINE)
    expect(page.locator("#trial-0")).to_contain_text("ok")
    expect(page.locator("#best")).to_contain_text("nothing is faster than the baseline so far")
    second = story.start(zero_stage=2)
    expect(page.locator("#trial-1")).to_contain_text("running")
    story.progress_of(second, 5)
    expect(page.locator("#current-step")).to_have_text("trial 1: measuring · step 5 · 123 ms")
    story.finish(second, story_report(0.2))
    expect(page.locator("#best .figure")).to_have_text(re.compile(r"^(1\.9|2\.0)\d×$"))
    story.failed(Outcome.OOM_DEVICE, "rank 0: over the limit", micro_batch_size=16)
    expect(page.locator("#trial-2")).to_contain_text("out of device memory")
    expect(page.locator("#chart-history")).to_have_attribute("data-points", re.compile(r"[4-9]"))
    expect(page.locator("#chart-history .chart-legend")).to_contain_text("out of memory")

    story.phase(StudyPhase.CONFIRMING)
    story.repeat(1, 0.2, 400, seed=7)
    expect(page.locator("#trial-1")).to_contain_text("2 runs")
    story.succeed(1)
    expect(page.locator("#study-head .badge").first).to_have_text("succeeded")
    expect(page.locator("#best")).to_contain_text("confirmed")
    expect(page.locator("#live")).to_have_count(0)
    assert page.evaluate("window.notReloaded") is True
    assert streams == [], "one stream for the whole life of the page: it was open before"


def story_report(step_seconds: float) -> TrialReport:
    return TrialReport(outcome=Outcome.OK, measurement=measurement(step_seconds, peak_mib=500))


def test_sort_filter_and_choose_the_columns_of_the_table(logged_in: Page, store: Database) -> None:
    page = logged_in
    story = Story.submit(store, request())
    finished(story)
    page.goto(f"/studies/{story.study.id}")
    page.evaluate("window.notReloaded = true")
    assert first_column(page) == list(range(12))

    page.click("[data-sort=tokens_per_second]")
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("Throughput")
    assert first_column(page)[:3] == [5, 9, 11]
    page.click("[data-sort=tokens_per_second]")
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("Throughput")
    assert first_column(page)[0] == 7
    assert "sort=tokens_per_second" in page.url

    page.select_option("[name=outcome]", "timeout")
    expect(page.locator("#trials tbody tr")).to_have_count(1)
    page.select_option("[name=outcome]", "")
    expect(page.locator("#trials tbody tr")).to_have_count(12)
    expect(page.locator("[data-sort=hysteresis]")).to_have_count(0)
    page.check("[name=knobs]")
    expect(page.locator("[data-sort=hysteresis]")).to_have_count(1)
    assert page.evaluate("window.notReloaded") is True

    page.reload()
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("Throughput")
    expect(page.locator("[name=knobs]")).to_be_checked()


def test_open_a_trial_and_walk_to_the_next(logged_in: Page, store: Database) -> None:
    page = logged_in
    story = Story.submit(store, request())
    finished(story)
    page.goto(f"/studies/{story.study.id}")
    page.click("#trial-5 a")
    expect(page.locator("h1")).to_have_text("Trial 5")
    expect(page.locator("#chart-steps")).to_have_attribute("data-points", "45")
    expect(page.locator("#chart-losses")).to_have_attribute("data-points", "45")
    expect(page.locator("#log")).to_contain_text("steady after 3 steps")
    page.click("text=Trial 6")
    expect(page.locator("#trial-detail")).to_contain_text('"addmm" not implemented')
    expect(page.locator("#trial-detail")).to_contain_text("Crashed")


def test_a_point_of_a_chart_leads_to_its_trial(logged_in: Page, store: Database) -> None:
    page = logged_in
    story = Story.submit(store, request())
    searched(story)
    page.goto(f"/studies/{story.study.id}")
    expect(page.locator("#chart-memory .points path").first).to_be_visible()
    page.locator("#chart-memory .scatterlayer .points path").first.hover(force=True)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_url(re.compile(r"/trials/\d+$"))


def test_see_and_download_every_export(logged_in: Page, store: Database, tmp_path: Path) -> None:
    page = logged_in
    story = Story.submit(store, request())
    finished(story)
    page.goto(f"/studies/{story.study.id}")
    choices = page.locator("#export > .actions > a")
    formats = choices.all_inner_texts()
    assert {"engine", "deepspeed", "accelerate", "accelerate-fsdp", "fsdp"} <= set(formats)
    downloaded = set()
    for name in formats:
        choices.get_by_text(name, exact=True).click()
        file = page.locator(f'#export-file a[href$="/export/{name}/download"]')
        refusal = page.locator("#export-file [role=alert]", has_text=f"{name} cannot express")
        expect(file.or_(refusal)).to_be_visible()
        if refusal.is_visible():  # ZeRO 1 has no counterpart in FSDP: it says so
            assert "fsdp" in name
            expect(refusal).to_contain_text("zero_stage")
            continue
        shown = page.locator("#export-text").inner_text()
        with page.expect_download() as waiting:
            page.click("#export-file a[download]")
        saved = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(saved)
        assert saved.read_text().strip() == shown.strip()
        downloaded.add(name)
        if name == "deepspeed":
            assert json.loads(shown)["train_micro_batch_size_per_gpu"] == 8
    assert {"engine", "deepspeed", "accelerate"} <= downloaded


def test_copy_an_export(logged_in: Page, store: Database) -> None:
    page = logged_in
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    story = Story.submit(store, request())
    finished(story)
    page.goto(f"/studies/{story.study.id}")
    page.locator("#export > .actions > a").get_by_text("deepspeed", exact=True).click()
    page.click("#export-file button[data-copy]")
    expect(page.locator("#export-file button[data-copy]")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == page.locator("#export-text").text_content()


def test_cancel_asks_first_and_delete_too(logged_in: Page, store: Database) -> None:
    page = logged_in
    study_id = submit(page, name="to-cancel")
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.click("#study-head button:has-text('Cancel')")
    expect(page.locator("#study-head .badge").first).to_have_text("queued")
    page.once("dialog", accept)
    page.click("#study-head button:has-text('Cancel')")
    expect(page.locator("#study-head .badge").first).to_have_text("cancelled")
    page.once("dialog", accept)
    page.click("#study-head button:has-text('Delete')")
    page.wait_for_url(re.compile(r"/$"))
    expect(page.locator(f"#study-{study_id}")).to_have_count(0)


def test_a_running_study_says_that_it_is_cancelling(logged_in: Page, store: Database) -> None:
    page = logged_in
    story = Story.submit(store, request())
    story.claim()
    page.goto(f"/studies/{story.study.id}")
    page.once("dialog", accept)
    page.click("#study-head button:has-text('Cancel')")
    expect(page.locator("#study-head .badge").first).to_have_text("cancelling")
    expect(page.locator("#study-head button:has-text('Cancel')")).to_be_disabled()


def test_a_failed_study_shows_why(logged_in: Page, store: Database) -> None:
    page = logged_in
    story = Story.submit(store, request())
    story.claim()
    page.goto(f"/studies/{story.study.id}")
    story.fail("rank 0: ModuleNotFoundError: No module named 'flash_attn'")
    expect(page.locator("#study-error")).to_be_visible()
    expect(page.locator("#study-error")).to_contain_text("No module named 'flash_attn'")


def test_hostile_text_stays_text(logged_in: Page, store: Database) -> None:
    page = logged_in
    story = Story.submit(store, request(HOSTILE))
    story.claim()
    story.ok(0.3, 300, role=TrialRole.BASELINE, log=HOSTILE)
    story.failed(Outcome.CRASHED, HOSTILE, log=HOSTILE)
    for path in ("/", f"/studies/{story.study.id}", f"/studies/{story.study.id}/trials/1", "/models"):
        page.goto(path)
        expect(page.locator("body")).to_contain_text("<img src=x onerror")
        assert page.evaluate("document.querySelectorAll('img[src=x]').length") == 0
        assert "owned" not in page.title() or "<img" in page.title()
    page.goto(f"/studies/{story.study.id}")
    expect(page.locator("#chart-history .points path").first).to_be_visible()
    page.locator("#chart-history .points path").last.hover(force=True)
    assert page.evaluate("document.querySelectorAll('.js-plotly-plot img, .hoverlayer a').length") == 0


def test_a_restart_of_the_service_is_waited_for(browser: Browser, tmp_path: Path) -> None:
    with running_service(tmp_path, "--no-scheduler") as first:
        page = browser.new_context(base_url=first.url).new_page()
        page.goto(f"/login#token={first.token}")
        page.wait_for_url(f"{first.url}/")
        database = Database(Settings(data_dir=tmp_path).database_url)
        story = Story.submit(database, request())
        story.claim()
        page.goto(f"/studies/{story.study.id}")
        expect(page.locator("#study-head .badge").first).to_have_text("running")
        first.kill()
        expect(page.locator("#connection")).to_be_visible()
    with running_service(tmp_path, "--no-scheduler", token=first.token, port=first.port):
        story.ok(0.4, 400, role=TrialRole.BASELINE)
        expect(page.locator("#trial-0")).to_contain_text("ok", timeout=30_000)
        expect(page.locator("#connection")).to_be_hidden()
        page.context.close()
    database.close()


def test_the_list_refreshes_itself(logged_in: Page, store: Database) -> None:
    page = logged_in
    story = Story.submit(store, request("listed"))
    page.goto("/")
    expect(page.locator(f"#study-{story.study.id}")).to_contain_text("queued")
    finished(story)
    expect(page.locator(f"#study-{story.study.id}")).to_contain_text("succeeded")
    expect(page.locator(f"#study-{story.study.id}")).to_contain_text("1.4")


def test_problems_of_a_form_are_shown_and_mended(logged_in: Page) -> None:
    page = logged_in
    page.watched.allowed = ("422",)  # type: ignore[attr-defined]
    page.goto("/studies/new")
    page.fill('[name="training.global_batch_size"]', "31")
    page.fill('[name="hardware.devices"]', "2")
    page.click("text=Submit study")
    field = page.locator('[name="training.global_batch_size"]')
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator('[id="training.global_batch_size-error"]')).to_contain_text("31 not divisible by 2")
    field.fill("32")
    page.click("text=Edit as JSON")
    expect(page.locator("#json")).to_have_value(re.compile(r'"global_batch_size": 32'))
    page.click("text=Submit study")
    page.wait_for_url(re.compile(r"/studies/[0-9a-f]{32}$"))


def test_the_form_shows_only_what_the_chosen_kind_needs(logged_in: Page) -> None:
    page = logged_in
    page.goto("/studies/new")
    expect(page.locator('[name="gpt.layers"]')).to_be_visible()
    page.check("[name=kind][value=vit]")
    expect(page.locator('[name="gpt.layers"]')).to_be_hidden()
    expect(page.locator('[name="vit.patch_size"]')).to_be_visible()
    expect(page.locator("[name=zero_stage]").first).to_be_hidden()
    page.check("[name=space][value=chosen]")
    expect(page.locator("[name=zero_stage]").first).to_be_visible()


def test_make_a_plan_and_export_a_row_of_it(logged_in: Page, store: Database) -> None:
    page = logged_in
    page.goto("/studies/new")
    expect(page.locator('[name="hardware.cluster"]')).to_be_hidden()
    page.check('[name="purpose"][value="plan"]')
    expect(page.locator('[name="budget.max_trials"]')).to_be_hidden()
    page.select_option('[name="hardware.cluster"]', "h100-80gb")
    page.fill('[name="hardware.devices"]', "8")
    page.fill('[name="hardware.tensor_parallel"]', "auto")
    page.click("text=Make the plan")
    page.wait_for_url(re.compile(r"/studies/[0-9a-f]{32}$"))
    expect(page.locator("#study-head")).to_contain_text("8 × h100-80gb")
    story = Story.submit(store, plan_request())
    page.goto(f"/studies/{story.study.id}")
    expect(page.locator("#plan")).to_have_count(0)
    found = planned(story).summary
    expect(page.locator("#plan tbody tr")).to_have_count(len(found.fastest))  # it arrives by itself
    row = [number for number, point in enumerate(found.rows, start=1) if point.runs_here][1]
    page.select_option("#plan-row", str(row))
    page.click("#export button:has-text('deepspeed') >> nth=0")
    expect(page.locator("#export-text")).to_contain_text("PREDICTED for 64 x NVIDIA A100")
    expect(page.locator("#export-text")).to_contain_text(f"(row {row} of a plan)")


def test_a_session_that_ends_leads_to_the_log_in_page(logged_in: Page, store: Database) -> None:
    page = logged_in
    story = Story.submit(store, request())
    finished(story)
    page.goto(f"/studies/{story.study.id}")
    page.context.clear_cookies()
    page.click("[data-sort=gain]")
    expect(page).to_have_url(re.compile("/login"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_the_window(logged_in: Page, store: Database, scheme: str, width: int) -> None:
    page = logged_in
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.set_viewport_size({"width": width, "height": 850})
    story = Story.submit(store, request("a-name-without-any-break-" * 4))
    finished(story)
    base, plan = f"/studies/{story.study.id}", Story.submit(store, plan_request())
    planned(plan)
    for path in ("/", base, f"/studies/{plan.study.id}", f"{base}/trials/5", f"{base}/trials/6", "/studies/new",
                 "/studies/new?mode=json", "/models", "/hardware"):
        page.goto(path)
        page.wait_for_load_state("networkidle")
        excess = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert excess <= 0, path


def test_everything_can_be_reached_by_keyboard(logged_in: Page, store: Database) -> None:
    page = logged_in
    story = Story.submit(store, request())
    finished(story)
    page.goto(f"/studies/{story.study.id}")
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    page.locator("[data-sort=step_seconds]").focus()
    page.keyboard.press("Enter")
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("Step time")
    expect(page.locator("[data-sort=step_seconds]")).to_be_focused()


def test_every_control_has_a_name_and_every_picture_a_text(logged_in: Page, store: Database) -> None:
    page = logged_in
    story = Story.submit(store, request())
    searched(story)
    plan = Story.submit(store, plan_request())
    planned(plan)
    for path in ("/", f"/studies/{story.study.id}", f"/studies/{plan.study.id}", "/studies/new", "/hardware"):
        page.goto(path)
        unnamed = page.evaluate("""() => [...document.querySelectorAll('input:not([type=hidden]), select, textarea')]
            .filter((e) => !e.labels.length && !e.getAttribute('aria-label')).map((e) => e.name)""")
        assert unnamed == [], path
        silent = page.evaluate("""() => [...document.querySelectorAll('[role=img], progress')]
            .filter((e) => !e.getAttribute('aria-label')).map((e) => e.outerHTML.slice(0, 80))""")
        assert silent == [], path


def test_with_a_real_scheduler_a_study_runs_to_its_winner(browser: Browser, tmp_path: Path) -> None:
    with running_service(tmp_path / "real") as service:
        context = browser.new_context(base_url=service.url)
        context.set_default_timeout(20_000)
        page = context.new_page()
        watched = Watched(page)
        page.goto(f"/login#token={service.token}")
        page.wait_for_url(f"{service.url}/")
        page.goto("/studies/new?mode=json")
        page.fill("#json", json.dumps({
            "name": "gpt-real", "training": {"global_batch_size": 4}, "hardware": {"device": "cpu", "devices": 1},
            "model": {"kind": "gpt", "layers": 1, "hidden": 32, "heads": 2, "vocab": 64, "sequence_length": 16},
            "search": {"sampler": "random", "space": {"micro_batch_size": [1, 4]}, "confirm_rounds": 1, "finalists": 2,
                       "policy": {"max_warmup_steps": 2, "max_steps": 5}},
            "budget": {"max_trials": 2, "max_seconds": 120}}))
        page.click("text=Submit study")
        page.evaluate("window.notReloaded = true")
        expect(page.locator("#trial-1")).to_contain_text("ok", timeout=120_000)
        expect(page.locator("#study-head .badge").first).to_have_text("succeeded", timeout=120_000)
        expect(page.locator("#best")).to_contain_text("tok/s")
        assert page.evaluate("window.notReloaded") is True
        context.close()
        watched.check()
