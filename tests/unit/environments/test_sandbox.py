"""Programs that try to do harm in the sandbox: nothing happens, and the output says why."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tunekit.environments import sandbox
from tunekit.environments.sandbox import SandboxConfig, SandboxResult, run_python
from tunekit.errors import FieldError, UserError

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="the sandbox needs Linux")
LIMITS = SandboxConfig(timeout_seconds=120, max_memory_mb=256)  # a busy machine takes seconds to start a program
SHORT = replace(LIMITS, timeout_seconds=1)  # for programs that never end


# Files of 4 MB that have no name any more. Each of them is smaller than the limit.
UNLINKED = """
import mmap, os, time
files = []
for i in range(20):
    file = open("x", "w+b")
    file.write(bytes(1 << 22)); file.flush(); os.remove("x"); time.sleep(0.05)
"""
MANY_FILES = "for i in range(400): open(str(i), 'w'); time.sleep(0.002)"
# A thread with a table of descriptors of its own, which keeps them open
UNSHARED = """
import ctypes, os, time
def keep():
    for i in range(4):
        file = os.open("x", os.O_RDWR | os.O_CREAT)
        os.write(file, bytes(1 << 22)); os.remove("x")
    time.sleep(60)
thread = threading.Thread(target=keep); thread.start(); thread.join()
"""


def run(program: str, limits: SandboxConfig = LIMITS) -> SandboxResult:
    start = time.monotonic()
    result = run_python(program, limits)
    assert time.monotonic() - start < 50, "programs that are ended sleep for 60 seconds"
    return result


def test_programs_run() -> None:
    assert run("import json, math\nprint(json.dumps([math.floor(2.5)]))") == SandboxResult("[2]\n", "ok")
    assert run("import sys; sys.exit(3)").outcome == "error"
    assert run("open('a.txt', 'w').write('hi'); print(open('a.txt').read())") == SandboxResult("hi\n", "ok")
    assert run("import threading as t\nx = t.Thread(target=print, args=(1,)); x.start(); x.join()").output == "1\n"
    assert "sandbox_child" not in run("1 / 0").output
    assert "ZeroDivisionError" in run("1 / 0").output


@pytest.mark.parametrize(
    ("program", "outcome", "text"),
    [
        ("while True: pass", "timeout", ""),
        ("import time; time.sleep(60)", "timeout", ""),
        ("import os, time; os.close(1); os.close(2); time.sleep(60)", "timeout", ""),
        ("while True: print('x' * 1000)", "output", "xxx"),
        ("import os\nwhile True: os.fork()", "error", "PermissionError"),
        ("import subprocess; subprocess.run(['/bin/ls'])", "error", "PermissionError"),
        ("import os; os.execv('/bin/ls', ['ls'])", "error", "PermissionError"),
        ("x = bytearray(10**9)", "error", "MemoryError"),
        ("print(open('/etc/passwd').read())", "error", "PermissionError"),
        ("import os; print(os.listdir('/'))", "error", "PermissionError"),
        ("import os; print(os.readlink('/proc/self/exe'))", "error", "PermissionError"),
        ("import os; print(os.listxattr('/etc/passwd'))", "error", "PermissionError"),
        ("import os; print(os.getxattr('/etc/passwd', 'user.x'))", "error", "PermissionError"),
        ("import os; print(os.listdir(os.path.dirname(os.__file__))[:0])", "ok", "[]"),  # as docs/environments.md says
        ("import os; print(open(f'/proc/{os.getppid()}/environ').read())", "error", "PermissionError"),
        ("import socket; socket.socket()", "error", "PermissionError"),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", "error", "PermissionError"),
        ("import socket; socket.getaddrinfo('example.com', 80)", "error", ""),
        ("open('/tmp/tunekit-escape', 'w')", "error", "PermissionError"),
        ("import os; os.chmod('/tmp', 0o777)", "error", "PermissionError"),
        ("import os; os.symlink('/etc/passwd', 'x')", "error", "PermissionError"),
        ("open('x', 'w').write('x' * 10**8)", "error", "File too large"),
        ("for i in range(10**6): open(str(i), 'w').write('x')", "files", ""),
        (f"{UNLINKED}    files.append(file)", "files", ""),
        (f"{UNLINKED}    files.append(mmap.mmap(file.fileno(), 4096)); file.close()", "files", ""),
        (f"import threading\n{UNSHARED}", "files", ""),
        (
            "import os, time; os.close(1); os.close(2)\nfor i in range(400): open(str(i), 'w'); time.sleep(0.002)",
            "files",
            "",
        ),
        ("import os; os.kill(os.getppid(), 9)", "error", "PermissionError"),
        ("import os; os.kill(0, 9)", "error", "PermissionError"),
        ("import os; os.kill(-1, 9)", "error", "PermissionError"),
        ("import fcntl, os; fcntl.fcntl(0, 8, os.getppid())", "error", "PermissionError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1))", "error", ""),
        ("import os; os.kill(os.getpid(), 9)", "killed", ""),
    ],
)
def test_harmful_programs_are_observations(program: str, outcome: str, text: str) -> None:
    limits = SHORT if outcome == "timeout" else LIMITS
    result = run(program, limits)
    assert result.outcome == outcome and text in result.output
    assert result.outcome in ("ok", "error") or result.describe(limits) != result.output
    assert not Path("/tmp/tunekit-escape").exists()


def test_user_files_and_environment_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "secret-value")
    (tmp_path / "notes.txt").write_text("secret-value")
    for program in (f"print(open({str(tmp_path / 'notes.txt')!r}).read())", "import os; print(dict(os.environ))"):
        assert "secret-value" not in run(program).output
    with (tmp_path / "notes.txt").open() as open_file:  # descriptors are not inherited
        os.set_inheritable(open_file.fileno(), True)
        assert "OSError" in run(f"import os; print(os.read({open_file.fileno()}, 100))").output


def test_local_server_gets_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        run(f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))")
        with pytest.raises(TimeoutError):
            server.accept()


def test_program_leaves_no_files() -> None:
    path = run("import os; open('a', 'w'); print(os.getcwd())").output.strip()
    assert path and not Path(path).exists()


def test_nothing_runs_if_the_process_cannot_be_locked_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without Landlock: the call has a number that no kernel knows."""
    child = tmp_path / "child.py"
    child.write_text(sandbox.CHILD.read_text().replace("= 444, 445, 446", "= 4444, 4445, 4446"))
    monkeypatch.setattr(sandbox, "CHILD", child)
    with pytest.raises(UserError, match="landlock"):
        run_python(f"open({str(tmp_path / 'ran')!r}, 'w')", LIMITS)
    assert not (tmp_path / "ran").exists()


def test_removed_files_may_be_used() -> None:
    assert run("import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x' * 9)\nprint(1)").output == "1\n"
    program = "for i in range(200):\n    open('a', 'wb').write(bytes(1 << 20)); os.remove('a')\nprint('end')"
    assert run(f"import os\n{program}") == SandboxResult("end\n", "ok")  # 200 MB, never more than 1 at once


def test_stdin_is_empty() -> None:
    assert run("import os, sys; print(repr(sys.stdin.read()), repr(os.read(0, 10)))").output == "'' b''\n"
    assert "OSError" in run("import os; os.write(0, b'x')").output


def test_continuations_arrive_when_the_program_has_ended() -> None:
    objects = "import gc, sys\nobjects = [*gc.get_objects(), sys._getframe(1).f_locals]\n"
    search = f"{objects}print(any(chr(119) + 'ord17' in str(x) for x in objects))\n"
    result = run_python(f"{search}x = 1", LIMITS, "x += 1  # word17", "print(x)")
    assert result == SandboxResult("False\n2\n", "ok")
    large = "x = 1\n" * 50_000  # does not fit into a pipe
    assert run_python(large, LIMITS, large, "print(x)") == SandboxResult("1\n", "ok")
    for program in ("exit()", "1 / 0", "import os; os._exit(0)", "import os; os.close(0)\nexit()"):
        assert "reached" not in run_python(program, LIMITS, "print('reached')", large).output
    assert "ZeroDivision" in run_python("def f(): 1 / 0", LIMITS, "f()", "print('reached')").output


def test_program_cannot_request_its_continuation() -> None:
    request = "import os, time\nfor fd in range(3, 20):\n    try: os.write(fd, b'..')\n    except OSError: pass\n"
    read = "for fd in range(3, 20):\n    try: print(os.read(fd, 99))\n    except OSError: pass\n"
    result = run_python(f"{request}time.sleep(0.2)\n{read}", SHORT, "word = 17")
    assert "word" not in result.output and result.num_completed == 0


def test_threads_that_end_while_files_are_counted() -> None:
    chain = "def f():\n    if time.time() - start < 1: threading.Thread(target=f).start()\n"
    program = f"import threading, time\nstart = time.time()\n{chain}for _ in range(8): f()\ntime.sleep(1.2)"
    assert run(program).outcome in ("ok", "error")  # the last threads may not start while the process ends


def test_process_ends_if_its_parent_has_ended_before() -> None:
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from tunekit.environments import sandbox\n"
        "sandbox.os.getpid = lambda: 1 << 30\n"
        "from tunekit.errors import UserError\n"
        "try: print(sandbox.run_python('print(1)', sandbox.SandboxConfig()))\n"
        "except UserError as error: print('refused')\n"
    )
    result = subprocess.run([sys.executable, "-c", program, "."], capture_output=True, text=True)
    assert result.stdout == "refused\n"


def test_limits_are_checked() -> None:
    for values in ({"timeout_seconds": 0}, {"max_memory_mb": 10}, {"max_files": -1}):
        with pytest.raises(FieldError):
            SandboxConfig(**values)
