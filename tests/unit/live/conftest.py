"""The synthetic lifecycle, with which the tests of serving and feedback begin."""

from tests.unit.trust.conftest import fresh as fresh, untouched as untouched
