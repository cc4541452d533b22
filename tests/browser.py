"""A headless Chromium for tests of pages, driven over its debugging pipe: no driver is needed.

It is `FLEX_MODEL_BROWSER`, what `make test` has fetched (`.ci/make_browser`), or one on the PATH.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_ANSWER_S = 60.0


def find():
    """The browser; where there is none, a failure under `make test` and in CI, else a skip."""
    fetched = Path(sys.prefix) / "browser" / "browser"
    candidates = [os.environ.get("FLEX_MODEL_BROWSER"), fetched, *_NAMES]
    found = next(filter(None, (shutil.which(one) for one in candidates if one)), None)
    if found is None:
        message = "no headless browser: run `make browser`, or set FLEX_MODEL_BROWSER to Chromium"
        if os.environ.get("CI") or os.environ.get("FLEX_MODEL_REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    return found


@contextlib.contextmanager
def opened(size=(1200, 900)):
    """A `Page` in a browser of its own."""
    to_browser, from_browser = os.pipe(), os.pipe()
    # Away from the numbers 3 and 4, at which the browser expects its ends.
    ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (to_browser[0], from_browser[1])]

    def put_ends():
        for number, fd in enumerate(ends, start=3):
            os.dup2(fd, number)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [find(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]
        command += [f"--window-size={size[0]},{size[1]}", "--disable-dev-shm-usage", "about:blank"]
        process = subprocess.Popen(
            command, close_fds=False, preexec_fn=put_ends, stderr=subprocess.DEVNULL
        )
        for fd in (to_browser[0], from_browser[1], *ends):
            os.close(fd)
        try:
            yield Page(to_browser[1], from_browser[0])
        finally:
            process.kill()
            process.wait()
            os.close(to_browser[1])
            os.close(from_browser[0])


class Page:
    """One tab.

    Attributes:
        requests: URLs that the page asked for.
        errors: Uncaught errors and messages on the console.
    """

    def __init__(self, to_browser, from_browser):
        self._to, self._from = to_browser, from_browser
        self._buffer, self._last_id, self._session = b"", 0, None
        self._loaded = False
        self.requests, self.errors = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """A command of the DevTools protocol, and its answer."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self, deadline):
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            read = os.read(self._from, 1 << 20)
            assert read, "the browser ended"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event, params):
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        elif event == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])

    def open(self, file):
        """Load a file; the seconds until it was loaded and can be asked."""
        start = time.monotonic()
        self._loaded = False
        self.call("Page.navigate", url=Path(file).absolute().as_uri())
        while not self._loaded:
            self._next(start + _ANSWER_S)
        self.evaluate("1")
        return time.monotonic() - start

    def evaluate(self, expression):
        """The value of a JavaScript expression."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def type(self, text):
        """Press the keys of a text, where the focus is."""
        for character in text:
            self.call("Input.dispatchKeyEvent", type="char", text=character)

    def press(self, key):
        """Press a key by its name, as ``"Enter"``."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def mouse(self, kind, x, y, **params):
        """As ``Input.dispatchMouseEvent``: ``"mouseMoved"``, ``"mousePressed"``, ..."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **params)

    def click(self, selector):
        """Click in the middle of the first element of a CSS selector."""
        box = self.evaluate(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, *box, button="left", clickCount=1)
