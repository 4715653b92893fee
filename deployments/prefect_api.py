"""Prefect's server, as `python -m uvicorn` runs it, whose imports the garbage collector never looks at.

It takes a fifth of their time, and more whenever it looks at everything: together 2 of 13 CPU seconds in a tiny
lifecycle.
"""

from __future__ import annotations

import gc


def main() -> None:
    gc.disable()
    import prefect.server.api.server  # noqa: F401
    import uvicorn

    gc.freeze()
    gc.enable()
    uvicorn.main()


if __name__ == "__main__":
    main()
