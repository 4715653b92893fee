"""The Prefect task that registers a policy."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from xray.tasks import registration

register = task(cache_policy=NO_CACHE, persist_result=False, task_run_name="register")(registration.register)
