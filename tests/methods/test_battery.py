"""Every method passes the battery of tests/support/battery.py."""

from battery import *  # noqa: F403
