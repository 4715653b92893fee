"""`xray down`: stop what `xray up` started."""

from __future__ import annotations

from xray.cli.server_commands import Where, interruptible, prefect_api
from xray.deployments.server_home import find_server_home
from xray.deployments.servers import servers, stop, worker
from xray.deployments.service import Service
from xray.deployments.suspension import suspend
from xray_runtime.kernel.terminal import say

PANEL = "Servers"


def command(home: Where = None) -> None:
    """Stop exactly what `xray up` started; runs in progress are suspended, and the next `xray up` resumes them.

    Exit codes: 0 done, 2 bad input.
    """
    with interruptible():
        server_home = find_server_home(home)
        state = server_home.load() if server_home.path.is_dir() else None
        if state is None:
            say(f"nothing was started in {server_home.path}")
            return
        with server_home.locked():
            prefect, *others = servers(server_home, state)
            runs = worker(server_home, state)
            if (process := runs.find()) is not None:
                # Kill the worker first: it would start the next run and mark suspended ones as crashed.
                process.kill()
                _suspend(prefect_api(server_home, state), runs)
            # Clients stop before their servers.
            ended = stop(server_home, state, [runs, *reversed(others), prefect])
        say(f"stopped {', '.join(ended)}" if ended else "nothing was running")


def _suspend(api: str, runs: Service) -> None:
    try:
        suspended = suspend(api)
    except (OSError, ValueError):
        say("Prefect does not answer: runs are stopped, and continue after `xray up`")
        return
    if suspended:
        say(f"suspended: {', '.join(suspended)}; up to {runs.stop_s:.0f} s for snapshots; `xray up` resumes them")
