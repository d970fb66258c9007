"""Looking at pages as a person does: a headless Chromium, driven over its debugging pipe, and screenshots by a command.

    python tests/browser.py results/demo/report/index.html FOLDER

writes a picture of the page at laptop and phone width, light and dark, and says what is wrong with it. Chromium is
Debian's package `chromium`, or what CHROMIUM names.
"""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LAPTOP, PHONE = 1280, 390
SCHEMES = ("light", "dark")
# Chromium takes its orders at one of these and answers at the other.
_ORDERS, _ANSWERS = 3, 4
_TALLEST = 16_000


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One tab. `problems` are what its pages have said on the console or thrown since the last page was opened."""

    def __init__(self, orders: int, answers: int) -> None:
        self._orders, self._answers = os.fdopen(orders, "wb"), os.fdopen(answers, "rb")
        self._numbers, self._session, self._unread = itertools.count(1), None, b""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Load a page at a width in CSS pixels, for someone who prefers that colour scheme."""
        self.problems.clear()
        self.requests.clear()
        self._resize(width, 900)
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded = False
        self._ask("Page.navigate", url=page.absolute().as_uri())
        while not self._loaded:
            self._hear(self._read())
        self.value_of("window.drawn")  # the promise of a report's page that its pictures are there

    def value_of(self, script: str) -> Any:
        """What a script in the page gives."""
        given = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in given:
            raise RuntimeError(given["exceptionDetails"]["exception"].get("description"))
        return given["result"].get("value")

    def press(self, selector: str) -> None:
        self.value_of(f"document.querySelector({json.dumps(selector)}).click()")

    def point_at(self, x: float, y: float) -> None:
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path, width: int) -> None:
        """All of the page, from its head to its foot."""
        height = min(_TALLEST, int(self.value_of("document.documentElement.scrollHeight")))
        self._resize(width, height)
        data = self._ask("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)

    def _ask(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        order = {"id": number, "method": method, "params": parameters}
        if self._session:
            order["sessionId"] = self._session
        self._orders.write(json.dumps(order).encode() + b"\0")
        self._orders.flush()
        while True:
            said = self._read()
            if said.get("id") == number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']['message']}")
                return said["result"]
            self._hear(said)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = self._answers.read1(1 << 16)
            if not more:
                raise RuntimeError("Chromium has ended")
            self._unread += more
        first, _, self._unread = self._unread.partition(b"\0")
        return json.loads(first)

    def _hear(self, said: dict[str, Any]) -> None:
        about, values = said.get("method"), said.get("params", {})
        if about == "Page.loadEventFired":
            self._loaded = True
        elif about == "Runtime.exceptionThrown":
            self.problems.append(values["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif about == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console: {values['args']}")
        elif about == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"log: {values['entry']['text']}")
        elif about == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])


@contextmanager
def browser(chromium: str) -> Iterator[Browser]:
    """A browser of its own, with a profile that nobody else has; it is gone when the block ends."""
    its_orders, our_orders = os.pipe()
    our_answers, its_answers = os.pipe()
    # High numbers, so that neither is one of the two at which it looks.
    given = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (its_orders, its_answers)]
    # Its children may still write into the profile when the browser itself is gone.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                chromium,
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
                *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
            ],
            preexec_fn=lambda: (os.dup2(given[0], _ORDERS), os.dup2(given[1], _ANSWERS)),
            pass_fds=(_ORDERS, _ANSWERS),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (*given, its_orders, its_answers):
            os.close(end)
        try:
            yield Browser(our_orders, our_answers)
        finally:
            process.terminate()
            process.wait(timeout=20)


def overflow(tab: Browser) -> list[str]:
    """What reaches out of the page to the right, beyond tables that scroll by themselves."""
    return tab.value_of(
        """[...document.querySelectorAll("body *")].filter(node => !node.closest(".wide, nav") &&
             node.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
           .map(node => node.outerHTML.slice(0, 120))
           .concat(document.documentElement.scrollWidth > document.documentElement.clientWidth ? ["the page"] : [])"""
    )


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    page, folder, chromium = Path(sys.argv[1]), Path(sys.argv[2]), find_chromium()
    if not page.is_file():
        sys.exit(f"{page} does not exist; `dflop report RUN` writes a run's page")
    if chromium is None:
        sys.exit("there is no Chromium: install Debian's package `chromium`, or name one in CHROMIUM")
    folder.mkdir(parents=True, exist_ok=True)
    num_problems = 0
    with browser(chromium) as tab:
        for width, scheme in itertools.product((LAPTOP, PHONE), SCHEMES):
            tab.open(page, width, scheme)
            problems = [*tab.problems, *(f"reaches out of the page: {node}" for node in overflow(tab))]
            path = folder / f"{page.parent.parent.name}-{width}-{scheme}.png"
            tab.picture(path, width)
            print(f"{path}: {'; '.join(problems) or 'nothing wrong'}")
            num_problems += len(problems)
    sys.exit(num_problems > 0)


if __name__ == "__main__":
    main()
