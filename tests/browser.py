"""A headless Chromium that tells what a page asked for and complained about.

It is driven through chromedriver's HTTP interface, so that nothing but the two programs is needed.
"""

import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """One browser; use it as a context."""

    def __init__(self) -> None:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        driver = shutil.which("chromedriver")
        if chromium is None or driver is None:
            pytest.skip("chromium and chromedriver are not installed")
        self.chromium, self.driver = chromium, driver

    def __enter__(self) -> "Browser":
        self._profile = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [self.driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._process.stdout is not None
        line = next(line for line in self._process.stdout if "started successfully on port" in line)
        self._address = f"http://127.0.0.1:{line.strip().rstrip('.').split()[-1]}/session"
        options = {
            "binary": self.chromium,
            "args": [*FLAGS, f"--user-data-dir={self._profile.name}"],
        }
        capabilities = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        session = self._post("", {"capabilities": {"alwaysMatch": capabilities}})
        self._address += f"/{session['sessionId']}"
        self._post("/url", {"url": "about:blank"})
        self.console(), self.requests()  # those of the browser's own start page
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._send(urllib.request.Request(self._address, method="DELETE"))
        finally:
            self._process.terminate()
            self._process.communicate()
            self._profile.cleanup()

    def open(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Loads a page at a width in CSS pixels."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)
        self._post("/url", {"url": url})

    def cdp(self, command: str, **arguments: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._post("/goog/cdp/execute", {"cmd": command, "params": arguments})

    def evaluate(self, script: str) -> Any:
        """What a JavaScript expression is in the page."""
        return self._post("/execute/sync", {"script": f"return {script}", "args": []})

    def console(self) -> list[str]:
        """What the page's console says, since the last call."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """All addresses asked for, since the last call."""
        time.sleep(0.2)  # a late request would come from a script's timer
        entries = self._post("/se/log", {"type": "performance"})
        events = [json.loads(entry["message"])["message"] for entry in entries]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        return self._send(urllib.request.Request(self._address + path, data=data, method="POST"))

    def _send(self, request: urllib.request.Request) -> Any:
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()[:2000]) from None
