"""Sandboxes that are reached by a byte stream to a process in them, as `exec` of container engines gives one.

`launch` runs a command over such a stream, `tunnel` is the gate over one. Their other halves, `*_inside.py`, are sent along as text and run
by a Python that the backend put in the sandbox; nothing else of the image is relied on.
"""
