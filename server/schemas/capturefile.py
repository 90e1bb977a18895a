"""The capture file: everything that was captured of one rollout, in one zip archive that `numpy.load` and `unzip` open too.

| member | holds |
|---|---|
| `graph.json` | a `CaptureFile`: facts of the rollout, and its nodes, parents first |
| `ids.npy` | int32 [tokens]: the nodes' own token ids, in the order of the nodes, so that a token is stored once whatever the branches |
| `log_probs.npy` | float32 [sampled tokens], in the same order; the mask is not stored: a turn's ids behind its scaffold were sampled |
| `routed.npy` | uint8: one bit per token (`numpy.packbits`), set where its expert routes are known |
| `routes.npy` | [routed tokens, layers, top_k] in the engine's own type, at best uint8; absent with `routed.npy` when the model is dense |

The archive's comment is `sha256:` and the digest of all bytes before it, so a file that was cut or changed anywhere is refused before it
is parsed. Whoever means to deceive can make a new digest: the record beside the file names its SHA-256, and the server's SQL record names
that of the record. Nothing in the file is ever unpickled. Server and plugin read it without numpy.
"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .capture import BranchClass, BranchReason, Drift, Exclusion
from .runspec import TrainRule

GRAPH, IDS, LOG_PROBS, ROUTED, ROUTES = "graph.json", "ids.npy", "log_probs.npy", "routed.npy", "routes.npy"
MAX_GRAPH = 256 * 2**20
"""Bytes of `graph.json`, unpacked."""
MAX_TOKENS = 2**26
_MARK = b"sha256:"
_COMMENT = len(_MARK) + 64
_DEFLATED = (GRAPH, IDS)
"""Members that shrink to a half or less; log-probs and routes hardly do, and stored they cannot unpack to more than the file holds."""


class CaptureFileError(ValueError):
    """The file is cut, changed, or no capture; the message says which, in one line."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_bytes="hex", val_json_bytes="hex")


class CallEntry(_Entry):
    """`arguments` is JSON text: what a policy wrote may hold what no UTF-8 can, such as an escaped half of a surrogate pair."""

    id: str
    name: str
    arguments: str


class TurnEntry(_Entry):
    """What a node has when it is a sampled turn, by the names of `trainer.capture.graph.Turn`. Bytes are hex."""

    index: int = Field(ge=0)
    call: bytes
    thread: str
    tools: bytes
    scaffold: int = Field(ge=0)
    spans: list[tuple[int, int]] = Field(min_length=1)
    stop: Literal["stop", "length", "aborted"]
    malformed: int
    prompt_tokens: int
    side: BranchClass | None
    drift: Drift | None
    sent: bool
    returned: bool
    started: float | None = None
    finished: float | None = None


class NodeEntry(_Entry):
    """One message and the number of ids it owns. A root has no parent, no id, and `tools`: the digest of its tool list."""

    parent: int | None = Field(default=None, ge=0)
    tokens: int = Field(ge=0)
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: list[CallEntry] = Field(default_factory=list)
    tool_call_id: str = ""
    reasoning: str | None = None
    tools: bytes = b""
    turn: TurnEntry | None = None


class BranchEntry(_Entry):
    """What became of a branch under the run's rule. `turns` are the indices of the turns that are trained, or excluded, here."""

    reason: BranchReason
    branch_class: BranchClass
    excluded: Exclusion | None
    turns: list[int]


class RoutesEntry(_Entry):
    """What the rows of `routes.npy` are."""

    dtype: Literal["|u1", "<u2", "<i2", "<i4"]
    layers: int = Field(ge=1, le=2**12)
    top_k: int = Field(ge=1, le=2**12)


class CaptureFile(_Entry):
    """`graph.json`. Nodes that lead to no turn (calls that were refused or cancelled) are not in it."""

    format: Literal["lego-rl capture 1"]
    trial_id: str
    harness: str
    context: int
    turn_cap_hit: bool
    over_length: bool
    engine_error: str | None
    proxy_error: str | None
    cancelled: int
    cancelled_tokens: int
    lost_tokens: int = 0
    """Streamed by calls that the engine then failed for good."""
    unknown_fields: list[str]
    violations: list[str]
    routes: RoutesEntry | None = None
    rule: TrainRule
    branches: list[BranchEntry]
    nodes: list[NodeEntry]


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Head of a `.npy` file, version 1.0, of a C-ordered array: to know it byte for byte spares a reader from parsing one."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    padded = text + " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode()


def pack(graph: CaptureFile, arrays: Mapping[str, bytes]) -> bytes:
    """The file's bytes; `arrays` are whole `.npy` files by member name. Equal captures give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in ({GRAPH: graph.model_dump_json(exclude_defaults=True).encode()} | dict(arrays)).items():
            member = zipfile.ZipInfo(name)
            member.compress_type = zipfile.ZIP_DEFLATED if name in _DEFLATED else zipfile.ZIP_STORED
            archive.writestr(member, data, compresslevel=1)
        archive.comment = b" " * _COMMENT
    body = buffer.getvalue()[:-_COMMENT]
    return body + _MARK + hashlib.sha256(body).hexdigest().encode()


class Members:
    """An open capture file. What is read is bounded before it is unpacked."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._members = {member.filename: member for member in archive.infolist()}
        try:
            self.graph = CaptureFile.model_validate_json(self._read(GRAPH, MAX_GRAPH))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise CaptureFileError(f"{GRAPH} is none of version 1: {where}: {first['msg']}") from None
        self.tokens = sum(node.tokens for node in self.graph.nodes)
        if self.tokens > MAX_TOKENS:
            raise CaptureFileError(f"{self.tokens} tokens are more than a capture may hold ({MAX_TOKENS})")

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
        """The values of one array, which must be exactly of this type and shape. Raises CaptureFileError."""
        head = npy_header(dtype, shape)
        size = len(head) + int(dtype[-1]) * math.prod(shape)
        data = self._read(name, size)
        if len(data) != size or not data.startswith(head):
            raise CaptureFileError(f"{name} is not of type {dtype} and shape {shape}, which {GRAPH} asks for")
        return data[len(head) :]

    def _read(self, name: str, limit: int) -> bytes:
        member = self._members.get(name)
        if member is None:
            raise CaptureFileError(f"{name} is missing")
        if member.file_size > limit or (member.compress_type != zipfile.ZIP_STORED and name not in _DEFLATED):
            raise CaptureFileError(f"{name} would unpack to {member.file_size} bytes, {limit} are expected")
        return self._archive.read(member)


@contextmanager
def opened(file: BinaryIO) -> Iterator[Members]:
    """Check the digest of a capture file and open it. Raises CaptureFileError."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - _COMMENT))
    comment = file.read(_COMMENT)
    if not comment.startswith(_MARK):
        raise CaptureFileError(f"no whole capture file: its {size} bytes do not end with their digest")
    file.seek(0)
    digest, left = hashlib.sha256(), size - _COMMENT
    while chunk := file.read(min(left, 2**20)):
        digest.update(chunk)
        left -= len(chunk)
    if digest.hexdigest().encode() != comment.removeprefix(_MARK):
        raise CaptureFileError("the capture file was changed after it was written: its digest is another")
    try:
        with zipfile.ZipFile(file) as archive:
            yield Members(archive)
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise CaptureFileError(f"no capture file: {error}") from None
