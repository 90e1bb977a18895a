"""The grader's half in the fresh sandbox: `python3 -I -S -B -c TEXT UID`, as `root` of the sandbox, with its payload on standard input.

Two processes. The *monitor* alone holds the verdict channel (the host's pipe on descriptor 1) and the nonce. The *checker* is forked
before the nonce is read, becomes the agent's user UID, applies the agent's changes to the pristine tree, and runs the check. The check
passed when the checker came to its end, said so, and exited 0: a graded file that makes it exit early says nothing. The check never lies
in the file system, so graded code cannot read it; the monitor belongs to another user; and giving up its user hides the checker's memory.
Where a sandbox has only one user (no root on the host), a system call hides both.

Answers: `unusable WHY` when the changes cannot be applied; else `ready` before any graded code runs, then `failed`, `killed` (by SIGKILL,
which may have come from outside), `tampered` (the check said so, or graded code stopped it), `opaque` (the check cannot judge what it saw)
or `passed NONCE`.
Only what is built into the interpreter is imported: every other import costs more than the grading.
"""

import _signal  # type: ignore[import-not-found]  # `signal` is not built in
import marshal
import os
import sys

LENGTH = 8
OPAQUE = 97
"""Exit status of a check that saw only values that it cannot judge, see `run_tests.py`."""
KILLED = 98
"""Exit status of a check whose graded process was ended by SIGKILL: it may have been the machine, so it is graded again."""
TAMPERED = 99
"""Exit status of a check that saw its own machinery lie, see `run_tests.py`. Graded code can bring it about, to its own cost."""


def main() -> None:
    uid = int(sys.argv[1])
    hide(uid)
    work_reader, work_writer = os.pipe()
    news_reader, news_writer = os.pipe()
    checker = os.fork()
    if checker == 0:
        os.close(work_writer)
        os.close(news_reader)
        check(uid, work_reader, news_writer)
    os.close(work_reader)
    os.close(news_writer)
    nonce = take(0)
    give(work_writer, take(0))
    if (news := os.read(news_reader, 512)) != b"ready":
        os.write(1, news or b"the checker ended before it began")
        return
    os.write(1, b"ready\n")
    give(work_writer, b"go")
    status = os.waitpid(checker, os.WUNTRACED)[1]
    try:
        os.killpg(checker, 9)
    except (ProcessLookupError, PermissionError):
        pass
    if os.WIFSTOPPED(status) or os.waitstatus_to_exitcode(status) == TAMPERED:
        os.write(1, b"tampered\n")
        return
    if os.waitstatus_to_exitcode(status) in (-9, KILLED):
        os.write(1, b"killed\n")
        return
    if os.waitstatus_to_exitcode(status) == OPAQUE:
        os.write(1, b"opaque\n")
        return
    os.set_blocking(news_reader, False)  # a process that graded code left behind may hold the other end
    try:
        done = os.read(news_reader, 16) == b"done"
    except BlockingIOError:
        done = False
    os.write(1, b"passed " + nonce + b"\n" if status == 0 and done else b"failed\n")


def hide(uid: int) -> None:
    """Keep this process's memory from other processes of the user, unless it is kept from them anyway."""
    if os.stat("/proc/self").st_uid == uid:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def take(fd: int) -> bytearray:
    """One message: its length, then that many bytes. Reads nothing ahead."""
    return exactly(fd, int.from_bytes(exactly(fd, LENGTH), "big"))


def exactly(fd: int, wanted: int) -> bytearray:
    data = bytearray(wanted)
    view = memoryview(data)
    while view:
        count = os.readv(fd, [view])
        if not count:
            os._exit(2)
        view = view[count:]
    return data


def give(fd: int, data: bytes | bytearray) -> None:
    for part in (len(data).to_bytes(LENGTH, "big"), data):
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]


def check(uid: int, work_reader: int, news_writer: int) -> None:
    os.setsid()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(2, 1)
    if os.getuid() != uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        hide(uid)  # a machine may be set up (fs.suid_dumpable) so that giving up its user does not
    changes, text, workspace, seconds = marshal.loads(take(work_reader))
    try:
        apply(workspace, changes)
        os.chdir(workspace)
    except OSError as error:
        os.write(news_writer, f"unusable {error}".encode(errors="replace")[:500])
        os._exit(1)
    os.write(news_writer, b"ready")
    take(work_reader)
    _signal.alarm(seconds)
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
        os.write(news_writer, b"done")
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
