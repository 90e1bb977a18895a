"""What the plugin and the CLI tell a person when something cannot be done: one line that says what to do.

```
ControlError            any failure at this boundary
└── ServerAbsent        no control plane is listening: `rl up` helps
```
"""

from __future__ import annotations


class ControlError(Exception):
    """The message is shown as it is, without a traceback."""


class ServerAbsent(ControlError):
    """Nothing listens where the data directory or `--url` says."""
