"""Takes the README's picture of the dashboard: a study's page of a running service.

    .venv/bin/python docs/screenshot.py --url http://127.0.0.1:8420 --token TOKEN [--study ID] [--out FILE]

Without --study, the newest study that succeeded. Needs Playwright and Chromium, as the tests do (``make setup``).
"""

import argparse
import json
import sys
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")
WIDTH, HEIGHT = 1280, 1010


def newest_success(url: str, token: str) -> str:
    """Id of the newest study that succeeded."""
    request = urllib.request.Request(f"{url}/api/v1/studies?state=succeeded&limit=1",
                                     headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        items = json.load(answer)["items"]
    if not items:
        sys.exit("no study has succeeded yet: run one first, for example with `make demo`")
    return str(items[0]["id"])


def take(url: str, token: str, study_id: str, out: Path, *, scheme: str = "light") -> None:
    """Save the top of a study's page, charts drawn, as PNG."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM if CHROMIUM.exists() else None, args=list(FLAGS))
        page = browser.new_context(base_url=url, viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=1.5,
                                   color_scheme="dark" if scheme == "dark" else "light").new_page()
        page.goto(f"/login#token={token}")
        page.wait_for_url(f"{url}/")
        page.goto(f"/studies/{study_id}")
        page.wait_for_selector("#chart-history[data-points]")
        page.wait_for_selector("#chart-memory[data-points]")
        out.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=out)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8420")
    parser.add_argument("--token", required=True)
    parser.add_argument("--study", help="id of the study; the newest that succeeded when not given")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images" / "dashboard.png")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    arguments = parser.parse_args()
    url = arguments.url.rstrip("/")
    study = arguments.study or newest_success(url, arguments.token)
    take(url, arguments.token, study, arguments.out, scheme=arguments.scheme)
    sys.stdout.write(f"{arguments.out}\n")


if __name__ == "__main__":
    main()
