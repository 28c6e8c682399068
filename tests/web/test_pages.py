"""Pages over HTTP: who gets in, what is escaped, how errors are shown, what is sent along."""

import re

import pytest
from fastapi.testclient import TestClient

from autotune.domain.throughput import told_throughput
from autotune.store import Database
from engine.report import Outcome
from tests.support.plans import plan_request
from tests.web.conftest import TOKEN
from tests.web.story import Story, finished, planned, request, searched
from web import format as fmt

HOSTILE = "<script>alert('x')</script>\"'&"


@pytest.fixture
def told(database: Database) -> Story:
    story = Story.submit(database, request())
    finished(story)
    return story


class TestLoggingIn:
    @pytest.mark.parametrize("path", ["/", "/studies/new", "/models", "/hardware", f"/studies/{'a' * 32}"])
    def test_every_page_leads_there_and_back(self, anonymous: TestClient, path: str) -> None:
        answer = anonymous.get(path)
        assert answer.status_code == 303
        login = anonymous.get(answer.headers["location"])
        assert login.status_code == 200
        assert f'name="next" value="{path}"' in login.text
        assert anonymous.post("/login", data={"token": TOKEN, "next": path}).headers["location"] == path

    def test_the_session_s_cookie_is_out_of_reach(self, anonymous: TestClient) -> None:
        cookie = anonymous.post("/login", data={"token": TOKEN}).headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert TOKEN not in cookie

    def test_a_wrong_token_is_refused_without_a_session(self, anonymous: TestClient) -> None:
        answer = anonymous.post("/login", data={"token": "wrong"})
        assert answer.status_code == 401
        assert "This is not the token" in answer.text
        assert "set-cookie" not in answer.headers

    @pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example", "evil", "/a\nb"])
    def test_it_never_leads_to_another_host(self, anonymous: TestClient, target: str) -> None:
        answer = anonymous.post("/login", data={"token": TOKEN, "next": target})
        assert answer.headers["location"] == "/"

    def test_logging_out_ends_the_session(self, client: TestClient) -> None:
        assert client.get("/").status_code == 200
        session = client.cookies["autotune_session"]
        assert client.post("/logout").status_code == 303
        client.cookies.set("autotune_session", session)
        assert client.get("/").status_code == 303

    def test_another_site_s_form_is_refused(self, client: TestClient, told: Story) -> None:
        answer = client.post(f"/studies/{told.study.id}/delete", headers={"Sec-Fetch-Site": "cross-site"})
        assert answer.status_code == 403
        assert client.get(f"/studies/{told.study.id}").status_code == 200


def test_a_trial_s_rates_are_over_the_same_runs(client: TestClient, database: Database, told: Story) -> None:
    with database.read() as tx:
        rate = told_throughput(tx.trials.get(told.study.id, 5))
    assert rate is not None
    text = client.get(f"/studies/{told.study.id}/trials/5").text
    assert fmt.rate(rate.tokens_per_second, "tok/s") in text
    assert fmt.rate(rate.samples_per_second, "samples/s") in text


def test_what_is_not_told_apart_is_named_with_its_rate(client: TestClient, database: Database) -> None:
    story = Story.submit(database, request())
    story.claim()
    for seconds in (0.4, 0.2, 0.201):
        trial = story.ok(seconds, 400)
    story.succeed(1, tie_with=(trial.number,))
    with database.read() as tx:
        rate = told_throughput(tx.trials.get(story.study.id, trial.number))
    assert rate is not None
    text = client.get(f"/studies/{story.study.id}").text
    assert re.search(rf"Not told apart from the fastest: <a[^>]*>trial 2</a> "
                     rf"\({re.escape(fmt.rate(rate.tokens_per_second, 'tok/s'))}, measured once\)", text)


class TestPolicy:
    def test_scripts_and_styles_come_from_here_only(self, client: TestClient, told: Story) -> None:
        answer = client.get(f"/studies/{told.study.id}")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["cache-control"] == "no-store"

    def test_pages_have_no_inline_script_style_or_foreign_address(self, client: TestClient, told: Story) -> None:
        paths = ["/", "/studies/new", "/studies/new?mode=json", "/models", "/hardware", f"/studies/{told.study.id}",
                 f"/studies/{told.study.id}/trials/5"]
        for path in paths:
            text = client.get(path).text
            assert not re.search(r"<script(?![^>]*\bsrc=)", text), path
            assert not re.search(r"\sstyle=|<style|\son\w+=|javascript:", text), path
            assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text), path

    def test_static_files_are_kept_by_digest_and_asked_about_without(self, client: TestClient) -> None:
        address = re.search(r'href="(/static/app\.css\?v=\w+)"', client.get("/").text)
        assert address is not None
        kept = client.get(address[1])
        assert "immutable" in kept.headers["cache-control"]
        assert client.get("/static/app.css").headers["cache-control"] == "no-cache"

    def test_plotly_comes_from_the_installed_wheel_compressed(self, client: TestClient) -> None:
        answer = client.get("/static/vendor/plotly.min.js")
        assert answer.status_code == 200
        assert answer.headers["content-encoding"] == "gzip"
        assert "plotly.js v" in answer.text[:100]

    @pytest.mark.parametrize("path", ["/static/../routes.py", "/static/%2e%2e/routes.py",
                                      "/static/vendor/../../routes.py"])
    def test_nothing_else_is_served(self, client: TestClient, path: str) -> None:
        assert client.get(path).status_code == 404


class TestEscaping:
    def test_names_details_and_logs_are_text(self, client: TestClient, database: Database) -> None:
        story = Story.submit(database, request(HOSTILE))
        story.claim()
        story.failed(Outcome.CRASHED, HOSTILE, log=HOSTILE)
        story.fail(HOSTILE)
        for path in ("/", "/models", f"/studies/{story.study.id}", f"/studies/{story.study.id}/trials/0",
                     f"/studies/new/from/{story.study.id}"):
            text = client.get(path).text
            assert "<script>alert" not in text, path
            assert "&lt;script&gt;alert" in text, path

    def test_so_is_what_an_address_says(self, client: TestClient) -> None:
        assert "<script>" not in client.get(f"/studies/{HOSTILE}").text
        assert "<script>alert" not in client.get("/?state=<script>alert(1)</script>").text
        assert "<script>alert" not in client.get('/login?next="><script>alert(1)</script>').text


class TestErrors:
    def test_an_unknown_study_is_a_page(self, client: TestClient) -> None:
        answer = client.get(f"/studies/{'0' * 32}")
        assert answer.status_code == 404
        assert "No such thing" in answer.text
        assert "All studies" in answer.text

    def test_an_unknown_trial_is_a_page(self, client: TestClient, told: Story) -> None:
        assert client.get(f"/studies/{told.study.id}/trials/99").status_code == 404

    def test_a_forged_cursor_is_a_page(self, client: TestClient) -> None:
        assert client.get("/?cursor=nonsense").status_code == 422

    def test_an_unknown_export_format_is_refused(self, client: TestClient, told: Story) -> None:
        assert client.get(f"/studies/{told.study.id}/export/horovod").status_code == 422


FORM = {"name": "gpt-form", "kind": "gpt", "gpt.layers": "2", "gpt.hidden": "64", "gpt.heads": "4",
        "training.global_batch_size": "16", "hardware.device": "cpu", "hardware.devices": "2"}


class TestSubmitting:
    def test_a_good_form_leads_to_its_study(self, client: TestClient) -> None:
        answer = client.post("/studies/new", data=FORM)
        assert answer.status_code == 303
        page = client.get(answer.headers["location"])
        assert "gpt-form" in page.text
        assert "queued" in page.text

    @pytest.mark.parametrize(("changes", "field", "message"), [
        ({"gpt.heads": "3"}, "gpt.hidden", "not divisible by heads 3"),
        ({"training.global_batch_size": "15"}, "training.global_batch_size", "15"),
        ({"gpt.layers": "many"}, "gpt.layers", "whole number"),
        ({"budget.max_trials": "0"}, "budget.max_trials", "greater than or equal to 1"),
        ({"name": " "}, "name", "at least 1 character"),
        ({"hardware.memory_limit_bytes": "lots"}, "hardware.memory_limit_bytes", "whole number"),
        ({"space": "chosen", "search.space.micro_batch_size": "3"}, "search.space.micro_batch_size", "3")])
    def test_a_problem_stands_beside_its_field_and_nothing_typed_is_lost(
            self, client: TestClient, changes: dict[str, str], field: str, message: str) -> None:
        answer = client.post("/studies/new", data=FORM | changes)
        assert answer.status_code == 422
        beside = re.search(rf'id="{re.escape(field)}-error".*?<span>(.*?)</span>', answer.text, re.DOTALL)
        assert beside is not None, re.findall(r'id="[^"]+-error.*', answer.text)
        assert message in beside[1]
        assert 'value="gpt-form"' in answer.text or "name" in changes
        assert client.get("/").text.count('id="study-') == 0

    def test_a_plan_is_made_from_the_form(self, client: TestClient) -> None:
        plan = FORM | {"purpose": "plan", "hardware.cluster": "h100-80gb", "hardware.devices": "8",
                       "hardware.tensor_parallel": "3"}
        wrong = client.post("/studies/new", data=plan)
        assert 'id="hardware.tensor_parallel-error"' in wrong.text
        answer = client.post("/studies/new", data=plan | {"hardware.tensor_parallel": "auto"})
        assert answer.status_code == 303
        page = client.get(answer.headers["location"]).text
        assert "8 × h100-80gb" in page
        assert "predicted, not measured" in page

    def test_a_task_that_is_not_allowed_is_refused_at_its_field(self, client: TestClient) -> None:
        answer = client.post("/studies/new", data=FORM | {"kind": "python", "python.entry_point": "os:system"})
        assert answer.status_code == 422
        assert "AUTOTUNE_ALLOWED_TASKS" in answer.text

    def test_the_form_becomes_json_that_can_be_submitted(self, client: TestClient) -> None:
        editor = client.post("/studies/new/json", data=FORM)
        assert editor.status_code == 200
        assert "&#34;global_batch_size&#34;: 16" in editor.text

    def test_json_with_an_unknown_field_says_which(self, client: TestClient) -> None:
        answer = client.post("/studies/new", data={"mode": "json", "json": '{"name": "x", "modell": {}}'})
        assert answer.status_code == 422
        assert "<code>modell</code>" in answer.text

    def test_broken_json_says_where_and_is_kept(self, client: TestClient) -> None:
        answer = client.post("/studies/new", data={"mode": "json", "json": '{"name": }'})
        assert answer.status_code == 422
        assert "line 1, column 10" in answer.text
        assert "{&#34;name&#34;: }" in answer.text

    def test_an_earlier_study_can_be_copied(self, client: TestClient, told: Story) -> None:
        assert client.get("/studies/new/from/%00").status_code == 404
        answer = client.get(f"/studies/new/from/{told.study.id}")
        assert "&#34;memory_limit_bytes&#34;: 629145600" in answer.text


class TestStudies:
    def test_the_list_filters_and_pages(self, client: TestClient, database: Database) -> None:
        stories = [Story.submit(database, request(f"study-{number:02}")) for number in range(27)]
        with database.begin() as tx:
            tx.studies.request_cancel(stories[0].study.id)
        first = client.get("/").text
        assert first.count('id="study-') == 25
        older = re.search(r'href="(/\?cursor=[^"]+)"', first)
        assert older is not None
        second = client.get(older[1].replace("&amp;", "&")).text
        assert second.count('id="study-') == 2
        assert "study-00" in second
        assert client.get("/?state=cancelled").text.count('id="study-') == 1

    def test_the_page_of_a_finished_study(self, client: TestClient, told: Story) -> None:
        text = client.get(f"/studies/{told.study.id}").text
        assert "confirmed" in text
        assert "over the limit of 600 MiB" in text
        assert "hx-sse:connect" not in text
        assert 'id="export"' in text

    def test_it_says_why_the_winner_won(self, client: TestClient, told: Story) -> None:
        text = client.get(f"/studies/{told.study.id}").text
        why = text[text.index('id="why"'):text.index('id="export"')]
        assert "What keeps it from being faster: " in why
        memory, times = why[:why.index('id="why-time"')], why[why.index('id="why-time"'):]
        assert [f"{found} MiB" for found in ("18.0", "18.0", "36.0", "426", "498")] == re.findall(
            r'<td class="num">[^<]+</td><td class="num">([^<]+)</td></tr>', memory)
        assert "Time of a step, predicted" in times
        assert re.search(r"optimizer step<span>\d+\.\d ms</span>", times)
        assert re.search(r'zero_<wbr>stage</td><td class="num">1</td><td class="num">2</td>\s*'
                         r'<td class="num">−[12].\d %</td>\s*'
                         r'<td><a href="/studies/\w+/trials/9">trial 9</a></td>', why)

    def test_a_plan_s_page_is_its_ranking(self, client: TestClient, database: Database) -> None:
        story = Story.submit(database, plan_request())
        found = planned(story).summary
        path = f"/studies/{story.study.id}"
        text = client.get(path).text
        assert text.count('id="ranking-') == len(found.fastest) == 20
        assert text.count('id="layouts-') >= len(found.layouts)
        for absent in ('id="trials"', "data-chart", "No trial", "plotly"):
            assert absent not in text
        assert client.get(f"{path}/live").text.count('id="ranking-') == 20
        row = found.first_exportable
        assert f'<option value="{row}">' in text
        file = client.get(f"{path}/export/deepspeed/download?row={row}").json()
        assert file["_comment"][0].startswith("PREDICTED for 64 x NVIDIA A100")
        part = client.get(f"{path}/export/deepspeed?row={row}", headers={"HX-Request": "true"}).text
        assert f'/export/deepspeed/download?row={row}"' in part
        assert "plan, predicted" in client.get("/").text

    def test_a_running_one_s_page_follows_from_its_last_event(self, client: TestClient, database: Database) -> None:
        story = Story.submit(database, request())
        searched(story)
        with database.read() as tx:
            last = tx.events.last_id(story.study.id)
        text = client.get(f"/studies/{story.study.id}").text
        assert f'hx-sse:connect="/api/v1/studies/{story.study.id}/events?last_event_id={last}"' in text
        assert 'id="export"' not in text

    def test_a_swap_keeps_the_address_in_step_with_the_table(self, client: TestClient, told: Story) -> None:
        path = f"/studies/{told.study.id}"
        current = {"HX-Request": "true", "HX-Current-URL": f"http://127.0.0.1{path}"}
        answer = client.get(f"{path}/live?sort=gain&order=desc", headers=current)
        assert answer.headers["hx-replace-url"] == f"{path}?sort=gain&order=desc"
        assert "hx-replace-url" not in client.get(f"{path}/live", headers=current).headers

    def test_charts_are_json(self, client: TestClient, told: Story) -> None:
        base = f"/studies/{told.study.id}"
        for path in ("charts/history", "charts/memory", "trials/5/charts/steps", "trials/5/charts/losses"):
            assert client.get(f"{base}/{path}").json()["data"], path

    def test_a_download_is_the_export(self, client: TestClient, told: Story) -> None:
        answer = client.get(f"/studies/{told.study.id}/export/deepspeed/download")
        assert answer.json()["train_batch_size"] == 32
        assert answer.headers["content-disposition"].startswith("attachment")

    def test_deleting_removes_it(self, client: TestClient, told: Story) -> None:
        assert client.post(f"/studies/{told.study.id}/delete").headers["location"] == "/"
        assert client.get(f"/studies/{told.study.id}").status_code == 404

    def test_a_long_log_is_cut_at_its_beginning(self, client: TestClient, database: Database) -> None:
        story = Story.submit(database, request())
        story.claim()
        story.ok(0.3, 100, log="first words\n" + "x" * 150_000 + "\nend")
        text = client.get(f"/studies/{story.study.id}/trials/0").text
        assert "end</pre>" in text
        assert "first words" not in text.partition('id="log"')[2]
        assert "the beginning is left out" in text
