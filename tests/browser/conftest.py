"""A real JupyterLab on the loopback interface, and a headless Chromium that looks at it."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "results" / "browser"  # ignored by git
START_S = 60
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is in the page
}
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@dataclass(frozen=True)
class Server:
    """A running JupyterLab that serves `folder`."""

    folder: Path
    settings: Path
    port: int
    token: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set(self, plugin: str, values: dict) -> None:
        """A user's setting, which the next page that is opened has."""
        path = self.settings / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    def ask(self, path: str, method: str = "GET"):
        """The answer of the server's REST interface; None when it has none."""
        request = urllib.request.Request(
            f"{self.url}{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read() or "null")


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Its configuration, settings and kernels' files are its own; all its processes end with it."""
    pytest.importorskip("jupyterlab", reason="no JupyterLab: pip install 'labkit[notebook]'")
    home = tmp_path_factory.mktemp("jupyter")
    folder = home / "course"
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    server = Server(folder, home / "settings", _free_port(), secrets.token_hex(16))
    for plugin, values in SETTINGS.items():
        server.set(plugin, values)
    log = home / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(server), cwd=folder, env=_environment(home, server),
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_until_ready(server, process, log)
        yield server
    finally:
        _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _command(server: Server) -> list[str]:
    return [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root",
        "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={server.port}",
        "--ServerApp.port_retries=0", f"--ServerApp.root_dir={server.folder}",
    ]  # fmt: skip


def _environment(home: Path, server: Server) -> dict[str, str]:
    folders = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTERLAB_SETTINGS_DIR": server.settings,
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "IPYTHONDIR": home / "ipython",
        "PYTHONPATH": ROOT,
    }
    named = {name: str(path) for name, path in folders.items()}
    return {**os.environ, **named, "JUPYTER_TOKEN": server.token}


def _wait_until_ready(server: Server, process, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            server.ask("/api/status")
            return
        except OSError:  # not listening yet
            time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise RuntimeError(f"JupyterLab gave no answer within {START_S} s; its log ends:\n{tail}")


def _end(process) -> None:
    """SIGTERM lets the server end its kernels, which have process groups of their own."""
    import psutil

    family = [process]
    with suppress(psutil.NoSuchProcess):
        family += psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install it")
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("no chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def lab(server, browser, request):
    """A page for one test, whose kernels end with it; how it looked last is kept in PICTURES."""
    page = browser.new_page(viewport={"width": 1400, "height": 1100})
    page.set_default_timeout(30_000)
    yield Lab(server, page)
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{request.node.name}.png")
    page.close()
    for kernel in server.ask("/api/kernels"):
        server.ask(f"/api/kernels/{kernel['id']}", "DELETE")


class Lab:
    """What a person does in JupyterLab."""

    def __init__(self, server: Server, page):
        self.server, self.page = server, page

    def write(self, name: str, *cells: str) -> str:
        """Write a notebook of code cells; the path to open it by."""
        import nbformat

        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
        nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}  # else Lab asks
        nbformat.write(nb, self.server.folder / name)
        return name

    def open_and_run(self, path: str, timeout_s: float = 60) -> None:
        """Open a notebook, run all of it through the menu, and wait until its kernel is idle."""
        self.page.goto(f"{self.server.url}/lab/tree/{path}?reset&token={self.server.token}")
        self._idle(START_S)
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_text("Run All Cells", exact=True).click()
        self.page.wait_for_function(
            """() => [...document.querySelectorAll('.jp-CodeCell')].every(
                cell => /\\[\\d+\\]/.test(cell.querySelector('.jp-InputPrompt').textContent)
                        || !cell.querySelector('.cm-content').textContent.trim())""",
            timeout=timeout_s * 1000,
        )
        self._idle(timeout_s)

    def _idle(self, timeout_s: float) -> None:
        """The status bar says so only once the page is connected to the kernel."""
        self.page.get_by_text("| Idle").wait_for(timeout=timeout_s * 1000)

    def errors(self) -> list[str]:
        """What went wrong in cells, and in widgets that their page could not draw."""
        kinds = ("application/vnd.jupyter.error", "application/vnd.jupyter.stderr")
        places = [f'.jp-OutputArea-output[data-mime-type="{kind}"]' for kind in kinds]
        broken = ".jupyter-widgets-error-widget"
        return self.page.locator(", ".join([*places, broken])).all_inner_texts()

    @property
    def words(self):
        """What the explorer says of its point."""
        return self.page.locator("[role=status]", has_text="-bound on")

    @property
    def feedback(self):
        """What the quizzes say, in their order on the page."""
        return self.page.locator("[role=alert]")
