"""Settings for all tests: property tests have no deadline, since timings never gate a test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvweave", deadline=None, max_examples=80, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvweave")
