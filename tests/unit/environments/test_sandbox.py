"""Programs that try to do harm in the sandbox: nothing happens, and the output says why."""

import os
import socket
import time
from pathlib import Path

import pytest

from tunekit.environments import sandbox
from tunekit.environments.sandbox import SandboxConfig, SandboxResult, run_python
from tunekit.errors import FieldError, UserError

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="the sandbox needs Linux")
LIMITS = SandboxConfig(timeout_seconds=2, memory_mb=256)


def run(program: str) -> SandboxResult:
    start = time.monotonic()
    result = run_python(program, LIMITS)
    assert time.monotonic() - start < 10
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
        ("import os; print(open(f'/proc/{os.getppid()}/environ').read())", "error", "PermissionError"),
        ("import socket; socket.socket()", "error", "PermissionError"),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", "error", "PermissionError"),
        ("import socket; socket.getaddrinfo('example.com', 80)", "error", ""),
        ("open('/tmp/tunekit-escape', 'w')", "error", "PermissionError"),
        ("import os; os.chmod('/tmp', 0o777)", "error", "PermissionError"),
        ("import os; os.symlink('/etc/passwd', 'x')", "error", "PermissionError"),
        ("open('x', 'w').write('x' * 10**8)", "error", "File too large"),
        ("for i in range(10**6): open(str(i), 'w').write('x')", "files", ""),
        ("import os; os.kill(os.getppid(), 9)", "error", "PermissionError"),
        ("import os; os.kill(0, 9)", "error", "PermissionError"),
        ("import os; os.kill(-1, 9)", "error", "PermissionError"),
        ("import fcntl, os; fcntl.fcntl(0, 8, os.getppid())", "error", "PermissionError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1))", "error", ""),
        ("import os; os.kill(os.getpid(), 9)", "killed", ""),
    ],
)
def test_harmful_programs_are_observations(program: str, outcome: str, text: str) -> None:
    result = run(program)
    assert result.outcome == outcome and text in result.output
    assert result.outcome in ("ok", "error") or result.describe(LIMITS) != result.output
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


def test_limits_are_checked() -> None:
    for values in ({"timeout_seconds": 0}, {"memory_mb": 10}, {"max_files": -1}):
        with pytest.raises(FieldError):
            SandboxConfig(**values)
