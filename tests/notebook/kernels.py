"""A notebook in a real kernel, whose processes, those of ranks included, can be counted."""

import contextlib
import os
import signal
import threading
import time
import uuid
from unittest import mock

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

MARK = "FLEX_MODEL_TEST_MARK"


def processes(mark):
    """The processes that inherited the mark, this one excepted; zombies have ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != "zombie":
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def wait_until_none_left(mark, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while left := processes(mark):
        if time.monotonic() > deadline:
            return [" ".join(process.cmdline()) for process in left]
        time.sleep(0.1)
    return []


@contextlib.contextmanager
def marked(folder):
    """Have the processes started meanwhile carry a mark, and end all of them at the end."""
    mark = uuid.uuid4().hex
    settings = {
        MARK: mark,
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "jupyter"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        with mock.patch.dict(os.environ, settings):
            yield mark
    finally:
        for process in processes(mark):
            with contextlib.suppress(psutil.Error):
                process.kill()


class Notebook:
    """Runs cells in a kernel, one after another."""

    def __init__(self, client):
        self._client = client
        self.pid = int(self.run("import os; print(os.getpid())").split()[-1])

    def cell(self, code, after_s=None, action=None):
        """Run a cell; return it, with its outputs. ``action`` is called meanwhile."""
        cell = nbformat.v4.new_code_cell(code)
        self._client.nb.cells.append(cell)
        if action is not None:
            timer = threading.Timer(after_s, action)
            timer.start()
        with contextlib.suppress(CellExecutionError):
            self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        return cell

    def run(self, code, **meanwhile):
        """Run a cell, which must not fail; return what it printed and displayed."""
        cell = self.cell(code, **meanwhile)
        assert error_of(cell) == "", error_of(cell)
        return text_of(cell)

    def fail(self, code, **meanwhile):
        """Run a cell, which must fail; return the error's text."""
        cell = self.cell(code, **meanwhile)
        assert error_of(cell), text_of(cell)
        return error_of(cell)

    def interrupt(self):
        os.kill(self.pid, signal.SIGINT)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


def text_of(cell):
    shown = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    ]
    return "".join(shown)


def html_of(cell):
    return "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)


def error_of(cell):
    return "".join(
        "\n".join([output["ename"], *output["traceback"]])
        for output in cell.outputs
        if output.output_type == "error"
    )


@contextlib.contextmanager
def started(folder, timeout_s=120):
    """A kernel in a folder; killed at the end if it does not end by itself."""
    resources = {"metadata": {"path": str(folder)}}
    book = nbformat.v4.new_notebook()
    client = NotebookClient(book, timeout=timeout_s, kernel_name="python3", resources=resources)
    with client.setup_kernel():
        yield Notebook(client)
