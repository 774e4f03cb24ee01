"""Opens docs/results.html in Chromium without a window, for its tests and its screenshot.

On Debian `apt install chromium chromium-driver` brings the browser. It needs no network.
"""

import contextlib
import importlib.util
import shutil
import tempfile

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1300",
]
SECONDS = 60  # until the page must be ready


def missing():
    """Why no page can be opened, or an empty text."""
    if importlib.util.find_spec("selenium") is None:
        return "the package selenium is not installed"
    for program in ("chromium", "chromedriver"):
        if not shutil.which(program):
            return f"{program} is not installed"
    return ""


@contextlib.contextmanager
def opened(path):
    """A driver that shows the page, after its script said that it is ready."""
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in [*FLAGS, f"--user-data-dir={profile}"]:
            options.add_argument(flag)
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        driver = webdriver.Chrome(options=options, service=service)
        try:
            driver.get(path.resolve().as_uri())
            ready = "return document.body.dataset.ready === 'yes'"
            WebDriverWait(driver, SECONDS).until(lambda _: driver.execute_script(ready))
            yield driver
        finally:
            driver.quit()
