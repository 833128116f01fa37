"""One notebook in one kernel: the Python that runs labkit, and no process left behind."""

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from jupyter_core.utils import run_sync
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NotebookExecutionManager

STARTUP_S = 120  # a cold file server takes its time
OUTPUT_S = 60  # a busy machine delivers a long output late; that is no failure


class ThisPython(AsyncKernelManager):
    """A kernel of `sys.executable`, whatever kernelspecs the user has installed.

    Everything that it writes for itself (connection file, sockets, IPython's profile, log) goes to
    `folder`, which should be local to the node: IPython's history database locks on NFS. The
    transport "ipc" uses sockets in that folder and cannot clash with another run's ports; "tcp"
    serves where a socket's path would be too long.
    """

    def __init__(self, folder: Path, transport: str):
        super().__init__(transport=transport, connection_file=str(folder / f"{transport}.json"))
        self.folder = folder

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="Python 3",
            language="python",
            env={"IPYTHONDIR": str(self.folder / "ipython")},
        )

    async def start_kernel(self, **options):
        with open(self.folder / "log", "ab") as log:
            await super().start_kernel(stdout=log, stderr=log, **options)

    @property
    def log_tail(self) -> str:
        """The last lines that the process wrote: why it did not start, or where it crashed."""
        with suppress(OSError):
            lines = (self.folder / "log").read_text(errors="replace").splitlines()
            return "\n".join(lines[-40:])
        return ""

    @property
    def exit_code(self) -> int | None:
        """The process's exit code (negative: the signal that killed it); None while it lives."""
        process = getattr(self.provisioner, "process", None)
        return process.poll() if process else None

    async def stop(self):
        """End the process, politely if it still listens, and then whatever it has started."""
        started = self._descendants()
        try:
            if self.has_kernel and await self.is_alive():
                await self.shutdown_kernel()
            else:
                await self.cleanup_resources()
        finally:
            self._kill_group()
            for process in started:
                with suppress(psutil.Error):  # psutil knows a process from a later one of its id
                    process.kill()

    def _descendants(self) -> list[psutil.Process]:
        process = getattr(self.provisioner, "process", None)
        if process:
            with suppress(psutil.Error):
                return psutil.Process(process.pid).children(recursive=True)
        return []

    def _kill_group(self):
        """What a kernel that died has left is found by its group alone."""
        group = getattr(self.provisioner, "pgid", None)
        if group and group != os.getpgrp():
            with suppress(OSError):  # most often: nothing is left
                os.killpg(group, signal.SIGKILL)
        if process := getattr(self.provisioner, "process", None):
            process.wait()


def transports() -> tuple[str, str]:
    """How to reach a kernel, at first and when it did not start. A socket's path must be short."""
    ipc = os.name == "posix" and len(os.fsencode(tempfile.gettempdir())) <= 70
    return ("ipc" if ipc else "tcp"), "tcp"


def execute(nb, kernel: ThisPython, folder: Path, timeout: int | None, before, after):
    """Run the cells of `nb`, in place, until one fails; `folder` is the working directory.

    `before(cell, cell_index)` and `after(cell, cell_index, execute_reply)` are called around each
    code cell. Raises nbclient's DeadKernelError and CellTimeoutError (`timeout` is in seconds, for
    one cell) and what the hooks raise. The widgets' state is kept in the notebook.
    """
    manager = NotebookExecutionManager(nb, progress_bar=False, autosave_cell_every=0)
    client = PapermillNotebookClient(
        manager,
        km=kernel,
        timeout=timeout,
        startup_timeout=STARTUP_S,
        iopub_timeout=OUTPUT_S,
        shell_timeout_interval=1,
        store_widget_state=True,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=before,
        on_cell_executed=after,
    )
    manager.notebook_start()
    try:
        client.execute()
        manager.notebook_complete()
    finally:
        # An interrupt leaves nbclient's tasks waiting; without this they would go on while the
        # kernel stops, and take its last answers for the cell's.
        run_sync(_cancel_other_tasks)()
        run_sync(kernel.stop)()
        if client.kc:
            client.kc.stop_channels()


async def _cancel_other_tasks():
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
