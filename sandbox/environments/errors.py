"""What goes wrong with a sandbox, whoever runs it.

SandboxError         could not do what was asked; the sandbox may go on
├── SandboxLost      the sandbox, or what runs it, is gone
├── NotStarted       a command was never started in it
└── ImageError       its image is missing or cannot be used
"""

from __future__ import annotations


class SandboxError(Exception):
    """The sandbox or its backend could not do what was asked; the message says what and why, `errno` what the kernel said."""

    errno: int | None = None


class SandboxLost(SandboxError):
    """The other end is gone: the sandbox was killed or broke its own process 1, or what runs the sandboxes ended."""

    stdout = b""
    """What the command that was running had printed until then."""
    outside = False
    """Whether nothing that ran in the sandbox can have done it: a node, an engine or a person did."""


class NotStarted(SandboxError):
    """A command was never started, so nothing of it ran: there was no place for a process, or the way into the sandbox did not open."""


class ImageError(SandboxError):
    """The image that a sandbox is made from is missing, cannot be built, or cannot be used."""
