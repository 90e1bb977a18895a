"""What the plugin and the CLI tell a person when something cannot be done: one line that says what to do.

```
ControlError            any failure at this boundary
└── NoAnswer            the control plane did not answer, this time
    └── ServerAbsent    none is listening: `rl up` helps
```
"""

from __future__ import annotations


class ControlError(Exception):
    """The message is shown as it is, without a traceback."""


class NoAnswer(ControlError):
    """The request timed out or its connection broke."""


class ServerAbsent(NoAnswer):
    """Nothing listens where the data directory or `--url` says."""
