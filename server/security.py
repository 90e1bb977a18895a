"""Who may ask what: bearer tokens, the browser's cookie, the Host header, response headers, redaction.

* The admin token may do everything. It lies in the data directory (mode 0600); a browser gets it as a cookie from the form at `/sign-in`.
* A run's event token may report events of that run and nothing else; the record holds only its hash.
* Reading is open on loopback, where the Host header must name this machine: a page elsewhere cannot rebind its name to us.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from pathlib import Path

from fastapi import HTTPException, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .schemas.rundir import write_atomic

COOKIE = "lego_rl_token"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
BODY_LIMIT = 16 * 2**20

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}


def load_or_create_token(path: Path) -> str:
    """The admin token, made on first use. Only its owner can read the file. An empty file, as a full disk leaves one, holds no token.

    Raises OSError, UnicodeDecodeError.
    """
    try:
        token = path.read_text().strip()
    except FileNotFoundError:
        token = ""
    if token:
        path.chmod(0o600)
    else:
        token = secrets.token_urlsafe(32)
        write_atomic(path, token + "\n")
    return token


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Guard:
    """Decides on one request. `open_reads`: no token is needed to read."""

    def __init__(self, token: str, *, open_reads: bool) -> None:
        self._hash = hash_token(token)
        self.open_reads = open_reads

    def is_token(self, token: str) -> bool:
        return bool(token) and secrets.compare_digest(hash_token(token), self._hash)

    def check_read(self, request: Request) -> None:
        if not self.open_reads and not self._is_admin(request):
            raise _unauthorized("reading from another machine needs the token: open /sign-in or send it as a bearer token")

    def check_write(self, request: Request) -> None:
        if not self._is_admin(request):
            raise _unauthorized("this needs the server's token (the file `token` in its data directory) as a bearer token")
        if bearer(request) is None and not _same_origin(request):
            raise HTTPException(403, "a browser may only write from this server's own pages")

    def _is_admin(self, request: Request) -> bool:
        token = bearer(request) or request.cookies.get(COOKIE)
        return token is not None and self.is_token(token)


def bearer(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token else None


def _same_origin(request: Request) -> bool:
    return request.headers.get("origin") == f"{request.url.scheme}://{request.headers.get('host')}"


def _unauthorized(detail: str) -> HTTPException:
    return HTTPException(401, detail, headers={"www-authenticate": "Bearer"})


class Perimeter:
    """ASGI middleware: refuse foreign Host headers and oversized bodies, add security headers to every answer.

    `hostnames` None allows every host.
    """

    def __init__(self, app: ASGIApp, hostnames: frozenset[str] | None) -> None:
        self._app = app
        self._hostnames = hostnames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = re.sub(r":\d+$", "", headers.get("host", "")).lower()
        if self._hostnames is not None and name not in self._hostnames:
            await PlainTextResponse(f"this server does not answer for the host {name[:100]!r}", 421)(scope, receive, send)
            return
        length = headers.get("content-length", "")
        sized = length.isdigit() or (not length and scope["method"] in ("GET", "HEAD", "DELETE"))
        if not sized or int(length or 0) > BODY_LIMIT:
            await PlainTextResponse(f"a request body needs a content-length of at most {BODY_LIMIT} bytes", 413)(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                for key, value in HEADERS.items():
                    out.setdefault(key, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


_SECRET = re.compile(
    r"(?i)(bearer\s+|token=|(?:event_token|runner_token|api[-_]?key)['\"]?\s*[:=]\s*['\"]?)[^\s'\"&]+|(://[^/\s:@]+:)[^\s@/]+(?=@)"
)


def redact(text: str) -> str:
    """Without tokens, keys and passwords in URLs."""
    return _SECRET.sub(lambda match: f"{match[1] or match[2]}***", text)


class RedactingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
