"""A Docker engine through the official SDK, from asyncio. Every error of the SDK is classified here and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sandbox.environments.errors import ImageError, SandboxError, SandboxLost
from server.schemas.runspec import Docker

from .stream import ExecStream, close_connection

if TYPE_CHECKING:
    from docker import APIClient
    from docker.errors import APIError

THREADS = 16
_ASK_S, _ANSWER_S = 20, 300
OLDEST_API = "1.41"
"""Docker 20.10: statistics of one container without a second of waiting."""


class EngineLost(SandboxLost):
    """The engine cannot be reached, or not do what it is there for."""

    outside = True


def connect(settings: Docker) -> APIClient:
    """Blocks. Raises SandboxError with what to do."""
    from docker.tls import TLSConfig

    tls: TLSConfig | bool = False
    if settings.tls is not None:
        places = [settings.tls.expanduser() / name for name in ("cert.pem", "key.pem", "ca.pem")]
        if missing := [path.name for path in places if not path.is_file()]:
            raise SandboxError(f"sandbox.docker.tls: {settings.tls} has no {', '.join(missing)}")
        certificate, key, authority = map(str, places)
        tls = TLSConfig(client_cert=(certificate, key), ca_cert=authority, verify=True)
    with boundary(settings.url):
        asking = _client(settings.url, OLDEST_API, tls, _ASK_S)
        try:
            newest = asking.version(api_version=False)["ApiVersion"]
        finally:
            asking.close()
        return _client(settings.url, newest, tls, _ANSWER_S)


def _client(url: str, version: str, tls: Any, seconds: float) -> APIClient:
    import docker

    api = docker.APIClient(base_url=url, version=version, timeout=seconds, tls=tls, max_pool_size=THREADS)
    # Variables such as REQUESTS_CA_BUNDLE would go before the authority that is named, and proxies are not for engines.
    api.trust_env = False
    return api


@contextlib.contextmanager
def boundary(url: str) -> Iterator[None]:
    """Turn what the SDK and its HTTP client raise into the errors of sandboxes."""
    from docker import errors
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except errors.APIError as error:
        raise _refused(error, url) from error
    except (errors.DockerException, RequestException, HTTPError, ConnectionError) as error:
        raise EngineLost(f"the Docker engine at {url} cannot be reached: {error}; start it, or set sandbox.docker") from error


def _refused(error: APIError, url: str) -> SandboxError:
    """By the status, and by what was asked for: the words may be those of an agent, such as the name of a file."""
    words = str(error.explanation or error)
    asked = urlsplit(error.response.url if error.response is not None else "").path.split("/")[2:]  # behind `/v1.41`
    match error.status_code, asked:
        case 404, ["images", *_] | ["containers", "create"]:
            return ImageError(f"{words}: pull or load the image on the engine at {url}")
        case 404 | 409, ["containers", _] | ["containers", _, "json" | "exec" | "start" | "stats" | "wait"] | ["exec", *_] | ["commit"]:
            return SandboxLost(words)  # the container is gone, or does not run
    return SandboxError(f"the Docker engine: {words}")


class Engine:
    """`api` is the SDK's client for calls that `call` and `exec` make."""

    def __init__(self, api: APIClient, settings: Docker) -> None:
        self.api = api
        self.url = settings.url
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")

    @classmethod
    async def open(cls, settings: Docker) -> Engine:
        return cls(await asyncio.to_thread(connect, settings), settings)

    async def call[T](self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run blocking work in the pool. What has begun goes on when the caller is cancelled: an engine cannot be told to stop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(self._call, work, *arguments, **options))

    def _call[T](self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        with boundary(self.url):
            return work(*arguments, **options)

    async def exec(self, container: str, command: list[str], user: str) -> tuple[str, ExecStream]:
        """Start a process in a container; its id, and its standard input and output."""
        made = await self.call(self.api.exec_create, container, command, stdin=True, stdout=True, stderr=True, user=user, workdir="/")
        starting = asyncio.ensure_future(self.call(self.api.exec_start, made["Id"], socket=True))
        try:
            connection = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_hang_up)
            raise
        return made["Id"], ExecStream(connection, self._pool)

    async def close(self) -> None:
        await self.call(self.api.close)
        self._pool.shutdown(wait=False, cancel_futures=True)


def _hang_up(starting: asyncio.Future[Any]) -> None:
    """A process that nobody waits for any more has started: without its connection it ends."""
    if not starting.cancelled() and starting.exception() is None:
        close_connection(starting.result())
