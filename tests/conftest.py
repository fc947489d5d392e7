"""Settings of property tests: no deadline, since timings never gate a test; few examples, or many when asked.

pytest --hypothesis-profile=thorough
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvweave", deadline=None, max_examples=30, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", settings.get_profile("kvweave"), max_examples=500)
settings.load_profile("kvweave")
