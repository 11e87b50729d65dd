"""Chromium without a window, for screenshots of the page and for its tests: Debian's chromium and chromium-driver."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str:
    """Why there is no browser here; empty if there is one."""
    if not any(shutil.which(name) for name in NAMES):
        return "no Chromium here: apt-get install chromium chromium-driver"
    return "" if shutil.which("chromedriver") else "no chromedriver here: apt-get install chromium-driver"


@contextmanager
def browser(downloads: Path | None = None) -> Iterator[webdriver.Chrome]:
    """A browser that keeps a log of every request, and nothing after it is closed."""
    options = Options()
    options.binary_location = next(found for name in NAMES if (found := shutil.which(name)))
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--force-color-profile=srgb"):
        options.add_argument(argument)
    for argument in ("--disable-background-networking", "--disable-component-update", "--no-first-run"):
        options.add_argument(argument)  # what the browser itself would fetch
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options.add_argument(f"--user-data-dir={profile}")
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            if downloads is not None:
                told = {"behavior": "allow", "downloadPath": str(downloads)}
                driver.execute_cdp_cmd("Browser.setDownloadBehavior", told)
            yield driver
        finally:
            driver.quit()


def screen(driver: webdriver.Chrome, width: int, height: int, *, scale: float = 1, phone: bool = False) -> None:
    """A window of that size, whatever the least size of windows is."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(driver: webdriver.Chrome, **features: str) -> None:
    """What the system is set to, such as `prefers_color_scheme="dark"`."""
    named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": named})


def requested(driver: webdriver.Chrome) -> list[str]:
    """Addresses of all requests since the last time."""
    events: list[dict[str, Any]] = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
