"""A headless Chromium that shows a file and says what it saw; tests that need one are skipped where there is none."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """One window. `errors` and `requests` are those since the page was opened."""

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, page: Path, *, dark: bool = False, width: int = 1100, script: bool = True) -> None:
        """Show a file in a window of this width, in pixels."""
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.devtools("Emulation.setScriptExecutionDisabled", value=not script)
        self.resize(width)
        self.media(dark=dark)
        self.driver.get(page.as_uri())

    def devtools(self, command: str, **values: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, values)

    def resize(self, width: int) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)

    def media(self, *, dark: bool = False, kind: str = "") -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", media=kind, features=[scheme])

    def run(self, code: str, *values: Any) -> Any:
        """What JavaScript returns."""
        return self.driver.execute_script(code, *values)

    def texts(self, selector: str) -> list[str]:
        """The texts of the elements that are to be seen."""
        code = (
            "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).map(e => e.innerText)"
        )
        return [" ".join(text.split()) for text in self.run(code, selector)]

    def click(self, selector: str, number: int = 0) -> None:
        self.driver.find_elements("css selector", selector)[number].click()

    def type(self, selector: str, *keys: str) -> None:
        self.driver.find_element("css selector", selector).send_keys(*keys)

    @property
    def errors(self) -> list[str]:
        """All that the console says."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    @property
    def requests(self) -> list[str]:
        """The addresses that were asked for, but for data in the page itself."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        urls = [event["params"]["request"]["url"] for event in sent]
        return [url for url in urls if not url.startswith("data:")]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test where there is no Chromium with its driver."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install -e .[dev]")
    found = [path for name in PROGRAMS if (path := shutil.which(name))]
    driver = shutil.which("chromedriver")
    if not (found and driver):
        pytest.skip("there is no chromium with chromedriver on the path, which shows reports to these tests")
    options = selenium.ChromeOptions()
    options.binary_location = found[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    try:
        yield Browser(started)
    finally:
        started.quit()
