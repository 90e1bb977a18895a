"""A sandbox of any backend as a Harbor environment, import path `sandbox.environments.harbor_env:SandboxEnvironment`.

Convention: `environment/workspace/` of a task is the pristine tree for `[environment].workdir`. What else is in the sandbox is up to the
backend: an image, or the host's programs. The network is the gate or nothing, so a task must ask for `no-network`.

`environment.mounts` (read-only binds: the harness runtime) reach the agent's sandbox only. Harbor makes the verifier's environment from the
same options; it gets neither them nor the gate. Only the separate verifier mode makes sense here: /tests and /logs/verifier of the agent's
own sandbox belong to `root`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.options import EnvironmentOptions
from harbor.models.task.config import NetworkMode

from sandbox.environments.backend import Backend, Sandbox, backend_of
from sandbox.environments.errors import ImageError, SandboxError
from sandbox.environments.spec import Directory, RoMount, SandboxSpec, User
from server.schemas.runspec import Sandbox as Settings

WORKDIR = "/workspace"
MAX_LOGS = 65 << 20
"""More than is read of a harness's log, so that what was cut here is seen to have been."""
_AGENT_PATHS = ("/logs/agent", "/logs/artifacts", "/home/agent", "/tmp")  # noqa: S108 -- paths in the sandbox
_DIRECTORIES = (
    Directory("/logs", "root"),
    Directory("/logs/agent"),
    Directory("/logs/artifacts"),
    Directory("/logs/verifier", "root"),
    Directory("/tests", "root"),
    Directory("/solution", "root"),
    Directory("/installed-agent", "root"),
    Directory("/runtime", "root"),
)


class SandboxOptions(EnvironmentOptions):
    """`TrialEnvironmentConfig.kwargs`."""

    base_dir: Path
    """State directory of the backend. One that this process started for it is used; otherwise every environment starts its own."""
    settings: Settings = Settings()
    """The section `sandbox` of a RunSpec."""
    gate: str | None = None
    """`host:port` of this rollout's proxy, for the agent's sandbox only."""


class SandboxEnvironment(BaseEnvironment):
    """One sandbox. `sandbox` and `gate_url` are for agents and verifiers of this room that work below Harbor's interface."""

    options_model = SandboxOptions
    options: SandboxOptions

    def __init__(self, *args: Any, session_id: str, **kwargs: Any) -> None:
        # Harbor ends the agent's session id with this; the verifier's it cuts at 63 characters, which may take its marker away.
        self.is_verifier = not session_id.endswith("__env")
        self._host: Backend | None = None
        self._sandbox: Sandbox | None = None
        self._untouched = True
        self.gate_url: str | None = None
        super().__init__(*args, session_id=session_id, **kwargs)

    @staticmethod
    @override
    def type() -> str:
        return "sandbox"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True)

    @classmethod
    @override
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        super().preflight(kwargs)
        settings = Settings.model_validate((kwargs or {}).get("settings", {}))
        if found := backend_of(settings).problems(settings):
            raise ValueError("; ".join(found))

    @override
    def _validate_definition(self) -> None:
        if not self._workspace.is_dir() and (image := self._image) is not None:
            raise ImageError(f"the tree of task {self.environment_name} lies in its image, {image}, and could not be copied out of it")
        if not self._workspace.is_dir():
            raise FileNotFoundError(
                f"task {self.environment_name} has no directory {self._workspace}: a sandbox starts from that tree; put the files of the "
                f"task's work directory there"
            )
        if self._network_policy.network_mode != NetworkMode.NO_NETWORK:
            raise ValueError(
                f"task {self.environment_name} asks for network_mode={self._network_policy.network_mode.value!r}, but a "
                'sandbox has no network: set network_mode = "no-network" in [environment] of its task.toml'
            )

    @property
    def _image(self) -> str | None:
        return self.task_env_config.docker_image or self.options.settings.image

    @property
    def _workspace(self) -> Path:
        return self.environment_dir / "workspace"

    @property
    def workdir(self) -> str:
        return self.task_env_config.workdir or WORKDIR

    @property
    def sandbox(self) -> Sandbox:
        """The running sandbox; SandboxError before `start` and after `stop`."""
        if self._sandbox is None:
            raise SandboxError(f"the sandbox of {self.session_id} is not running")
        return self._sandbox

    # ---------------------------------------------------------------- life

    @override
    async def start(self, force_build: bool) -> None:
        host = Backend.running(self.options.base_dir)
        if host is None:
            host = self._host = await backend_of(self.options.settings).start(self.options.base_dir, self.options.settings)
        self._sandbox = await host.create(self._spec())
        self._untouched = True
        if self.options.gate and not self.is_verifier:
            address, _, port = self.options.gate.rpartition(":")
            self.gate_url = await self._sandbox.open_gate(address, int(port))

    def _spec(self) -> SandboxSpec:
        asked = self.task_env_config
        limits = self.options.settings.limits
        given = {"memory_mb": asked.memory_mb, "disk_mb": asked.storage_mb}
        bound = []
        for mount in self._host_mounts:
            if mount["type"] != "bind" or not mount.get("read_only"):
                raise ValueError(f"mount {mount['target']} of {self.environment_name}: only read-only bind mounts are possible")
            bound.append(RoMount(Path(mount["source"]), mount["target"]))
        return SandboxSpec(
            workspace=self._workspace,
            workdir=self.workdir,
            mounts=tuple(bound),
            directories=_DIRECTORIES,
            limits=limits.model_copy(update={name: value for name, value in given.items() if value}),
            image=self._image,
            grading=self.is_verifier,
            name=self.session_id,
        )

    @override
    async def stop(self, delete: bool) -> None:
        """Both values of `delete` remove everything: a sandbox has no state that could be kept."""
        sandbox, self._sandbox = self._sandbox, None
        host, self._host = self._host, None
        self.gate_url = None
        try:
            if sandbox is not None:
                await sandbox.destroy()
        finally:
            if host is not None:
                await host.stop()

    # ---------------------------------------------------------------- commands

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Without a user the agent's sandbox runs commands as `agent`, the verifier's as `root`. Raises RuntimeError on a time-out."""
        self._untouched = False
        result = await self.sandbox.exec(
            command, env=self._merge_env(env), cwd=cwd, user=self._identity(self._resolve_user(user)), timeout_s=timeout_sec
        )
        stdout, stderr = result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
        if callback := self._output_callback():
            await callback(stdout, "stdout")
            await callback(stderr, "stderr")
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=stdout, stderr=stderr, return_code=result.return_code)

    def _identity(self, user: str | int | None) -> User:
        match user:
            case None:
                return "root" if self.is_verifier else "agent"
            case "root" | 0 | "0":
                return "root"
            case "agent":
                return "agent"
        raise ValueError(f"a sandbox has the users `agent` and `root`, not {user!r}")

    @override
    async def empty_dirs(self, dirs: Sequence[str | PurePosixPath], *, chmod: bool = True) -> ExecResult | None:
        """Nothing to do for the directories of a sandbox in which nothing has happened yet."""
        made = {directory.path for directory in _DIRECTORIES}
        if self._untouched and {str(path) for path in dirs} <= made:
            return ExecResult(stdout="", stderr="", return_code=0)
        return await super().empty_dirs(dirs, chmod=chmod)

    @override
    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        return await self.sandbox.kind(path) == "directory"

    @override
    async def is_file(self, path: str, user: str | int | None = None) -> bool:
        return await self.sandbox.kind(path) == "file"

    # ---------------------------------------------------------------- files

    def _owner(self, path: str) -> User:
        """Who owns an uploaded file: the agent in its own places, otherwise root."""
        own = (self.workdir, *_AGENT_PATHS)
        return "agent" if any(PurePosixPath(path).is_relative_to(place) for place in own) else "root"

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._untouched = False
        await self.sandbox.upload(Path(source_path), target_path, self._owner(target_path))

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        self._untouched = False
        await self.sandbox.upload(Path(source_dir), target_dir, self._owner(target_dir))

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._download(source_path, Path(target_path))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Of logs without end the first files, and the beginning of one."""
        await self._download(source_dir, Path(target_dir), cut=True)

    async def _download(self, source: str, target: Path, cut: bool = False) -> None:
        skipped = await self.sandbox.download(source, target, MAX_LOGS, user="root", cut=cut)
        if skipped:
            self.logger.warning("left out of the download of %s: %s", source, ascii(skipped[:10]))
