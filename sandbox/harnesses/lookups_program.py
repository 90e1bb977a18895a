"""`python -I lookups_program.py NET_FD [USER_FD]`: answer "no such name" to every DNS look-up in a network namespace, and print the name.

A sandbox's resolv.conf is empty, which makes every resolver ask 127.0.0.1. Prints `ready` first.
"""

from __future__ import annotations

import os
import socket
import struct
import sys


def asked(packet: bytes) -> tuple[str, int]:
    """The first question's name, and where the question ends. Raises IndexError for what is no query."""
    labels, at = [], 12
    while size := packet[at]:
        labels.append(packet[at + 1 : at + 1 + size].decode("ascii", "replace"))
        at += 1 + size
    return ".".join(labels).lower(), at + 5


def main() -> None:
    if len(sys.argv) > 2:
        os.setns(int(sys.argv[2]), os.CLONE_NEWUSER)
    os.setns(int(sys.argv[1]), os.CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 53))
        print("ready", flush=True)
        while True:
            packet, client = server.recvfrom(4096)
            try:
                name, end = asked(packet)
            except IndexError:
                continue
            print("".join(c if c.isprintable() else "?" for c in name), flush=True)
            # QR, RD copied, RA; RCODE 3; one question and nothing else.
            flags = 0x8083 | (packet[2] & 1) << 8
            server.sendto(packet[:2] + struct.pack("!HHHHH", flags, 1, 0, 0, 0) + packet[12:end], client)


if __name__ == "__main__":
    main()
