"""The gate's end in a sandbox without any network: `python3 -I -S -B -c TEXT PORT`, over standard input and output with `tunnel.py`.

Listens on 127.0.0.1:PORT. Messages both ways: 1 byte kind, 4 bytes connection, 4 bytes length, content.

R  listening (connection 0)          O  a connection came            D  data
A  that many bytes were taken (4 bytes)   E  no more data will come   C  the connection broke

Behind E from both sides a connection is over, once everything has been passed on.
Q  the gate is to close (connection 0)

Neither side has more than WINDOW bytes of a connection under way, so nobody's memory fills. The end of standard input ends the gate.
"""

import os
import selectors
import socket
import struct
import sys

HEAD = struct.Struct("!cII")
WINDOW = 1 << 18
CONNECTIONS = 64
BLOCK = 1 << 15


class Link:
    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.waiting = bytearray()
        self.credit = WINDOW
        self.reads = True
        """The program has not ended its direction."""
        self.ends = False
        """The host has ended its direction: to be passed on behind what waits."""
        self.ended = False

    def events(self) -> int:
        wanted = selectors.EVENT_READ if self.reads and self.credit > 0 else 0
        return wanted | (selectors.EVENT_WRITE if self.waiting or self.ends else 0)


class Tunnel:
    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self.listener.setblocking(False)
        self.links: dict[int, Link] = {}
        self.next = 1
        self.input = bytearray()
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ, None)
        self.selector.register(self.listener, selectors.EVENT_READ, self.listener)
        os.set_blocking(0, False)

    def say(self, kind: bytes, number: int, content: bytes = b"") -> None:
        view = memoryview(HEAD.pack(kind, number, len(content)) + content)
        while view:
            view = view[os.write(1, view) :]

    def serve(self) -> None:
        self.say(b"R", 0)
        while True:
            for key, events in self.selector.select():
                if key.fd == 0:
                    if not self.heard():
                        return
                elif key.data is self.listener:
                    self.accept()
                elif (link := self.links.get(key.data)) is not None:
                    self.move(key.data, link, events)

    def accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        if len(self.links) >= CONNECTIONS:
            connection.close()
            return
        number, self.next = self.next, self.next + 1
        self.links[number] = Link(connection)
        self.say(b"O", number)
        self.watch(number)

    def watch(self, number: int) -> None:
        """Ask the kernel for what the link waits for now."""
        link = self.links[number]
        wanted, known = link.events(), link.connection in self.selector.get_map()
        if wanted and known:
            self.selector.modify(link.connection, wanted, number)
        elif wanted:
            self.selector.register(link.connection, wanted, number)
        elif known:
            self.selector.unregister(link.connection)

    def drop(self, number: int, tell: bool = True) -> None:
        link = self.links.pop(number)
        if link.connection in self.selector.get_map():
            self.selector.unregister(link.connection)
        link.connection.close()
        if tell:
            self.say(b"C", number)

    def move(self, number: int, link: Link, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and link.credit > 0:
                data = link.connection.recv(min(BLOCK, link.credit))
                link.credit -= len(data)
                link.reads = bool(data)
                self.say(b"D" if data else b"E", number, data)
            if events & selectors.EVENT_WRITE and link.waiting:
                sent = link.connection.send(link.waiting)
                del link.waiting[:sent]
                self.say(b"A", number, sent.to_bytes(4, "big"))
            if link.ends and not link.waiting:
                link.ends, link.ended = False, True
                link.connection.shutdown(socket.SHUT_WR)
            if link.ended and not link.reads:
                self.drop(number, tell=False)
                return
        except BlockingIOError:
            pass
        except OSError:
            self.drop(number)
            return
        self.watch(number)

    def heard(self) -> bool:
        block = os.read(0, 1 << 16)
        self.input += block
        while len(self.input) >= HEAD.size:
            kind, number, size = HEAD.unpack_from(self.input)
            if len(self.input) < HEAD.size + size:
                break
            content = bytes(self.input[HEAD.size : HEAD.size + size])
            del self.input[: HEAD.size + size]
            if kind == b"Q":
                return False
            if number in self.links:
                self.obey(kind, number, content)
        return bool(block)

    def obey(self, kind: bytes, number: int, content: bytes) -> None:
        link = self.links[number]
        if kind == b"C":
            self.drop(number, tell=False)
            return
        if kind == b"D":
            link.waiting += content
        elif kind == b"A":
            link.credit += int.from_bytes(content, "big")
        elif kind == b"E":
            link.ends = True
        self.watch(number)


if __name__ == "__main__":
    Tunnel(int(sys.argv[1])).serve()
