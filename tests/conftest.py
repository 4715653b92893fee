"""What holds for all tests."""

from hypothesis import settings

# No test asserts a wall time.
settings.register_profile("xray", deadline=None)
settings.load_profile("xray")
