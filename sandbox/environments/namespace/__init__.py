"""Daemonless Linux sandbox from namespaces, one tmpfs per sandbox, cgroups or rlimits, and seccomp. Standard library and ctypes only.

`spawner` is a small single-threaded process that makes sandboxes; `inside` is process 1 of each; `sandbox` is the asyncio side.
Modules are imported by name: the processes that run with privileges load only what they need.
"""
