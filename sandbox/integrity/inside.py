"""The grader's half in the fresh sandbox. Its text is run as `python3 -I -S -B -c TEXT` with a marshalled payload on standard input.

Two processes. The *monitor* alone holds the verdict channel (the host's pipe on descriptor 1) and the nonce. The *checker* is forked
before the payload is read, so it has neither; it gets the check's source over a pipe, runs it and ends with its exit status. The check
passed when the checker came to its end, said so, and exited 0: a graded file that makes it exit early says nothing. The check itself
never lies in the file system, so graded code cannot read it, and no process of the same user can read the memory of these two.

Answers: `unusable WHY` when the agent's changes cannot be applied; else `ready` once the tree is built and before any graded code runs,
then `failed` or `passed NONCE`.
Only modules that are built in, `os` and `ctypes`: every other import costs more than the grading.
"""

import ctypes
import marshal
import os
import sys

libc = ctypes.CDLL(None)


def main() -> None:
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    source_reader, source_writer = os.pipe()
    done_reader, done_writer = os.pipe()
    checker = os.fork()
    if checker == 0:
        os.close(source_writer)
        os.close(done_reader)
        check(source_reader, done_writer)
    os.close(source_reader)
    os.close(done_writer)
    with os.fdopen(0, "rb") as stdin:
        payload = marshal.loads(stdin.read())  # written by the host
    try:
        apply(payload["workspace"], payload["changes"])
    except OSError as error:
        os.write(1, f"unusable {error}".encode(errors="replace")[:500])
        return
    os.write(1, b"ready\n")
    with os.fdopen(source_writer, "wb") as pipe:
        pipe.write(marshal.dumps((payload["check"], payload["workspace"], payload["seconds"])))
    status = os.waitpid(checker, 0)[1]
    try:
        os.killpg(checker, 9)
    except ProcessLookupError:
        pass
    os.set_blocking(done_reader, False)
    try:
        done = os.read(done_reader, 16) == b"done"
    except BlockingIOError:
        done = False
    os.write(1, b"passed " + payload["nonce"] + b"\n" if status == 0 and done else b"failed\n")


def check(source_reader: int, done_writer: int) -> None:
    os.setsid()
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    with os.fdopen(source_reader, "rb") as pipe:
        data = pipe.read()
    if not data:
        os._exit(2)
    text, workspace, seconds = marshal.loads(data)
    libc.alarm(seconds)
    os.chdir(workspace)
    sys.argv[:] = ["check.py", workspace]
    status = 0
    try:
        exec(compile(text, "check.py", "exec"), {"__name__": "__main__", "__file__": "check.py"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        os.write(2, f"check.py: {type(error).__name__}: {error}\n".encode())
        status = 1
    if status == 0:
        os.write(done_writer, b"done")
    os._exit(status & 255)


def apply(workspace: str, changes: list[tuple[str, str, int, bytes]]) -> None:
    directories = []
    for kind, path, mode, data in changes:
        target = os.path.join(workspace, path)
        if kind != "directory" or os.path.islink(target) or not os.path.isdir(target):
            remove(target)
        if kind == "directory":
            os.makedirs(target, exist_ok=True)
            directories.append((target, mode))
        elif kind == "link":
            os.symlink(data, target)
        elif kind == "file":
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(data)
                os.fchmod(file.fileno(), mode)
    for target, mode in reversed(directories):  # only now: a read-only directory takes no files
        os.chmod(target, mode)


def remove(target: str) -> None:
    if os.path.isdir(target) and not os.path.islink(target):
        for name in os.listdir(target):
            remove(os.path.join(target, name))
        os.rmdir(target)
    elif os.path.lexists(target):
        os.unlink(target)


main()
