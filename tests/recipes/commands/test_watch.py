"""`tune watch`: lines of a finished and of a running run, the screen of a terminal, and the server of the report."""

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.recipe_runs import Workspace
from tests.helpers.wait import wait_until
from tunekit.cli import main as cli
from tunekit.report.progress import BARS, ScreenSize, format_screen
from tunekit.report.run_files import read_run
from tunekit.report.server import ReportServer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Directory of an unfinished run."""
    (tmp_path / "config.yaml").write_text('recipe: sft\nmodel: "evil\\e[2Jmodel"\nmax_steps: 8\n')
    steps = ({"step": step, "loss": 4.0 / step, "lr": 0.1, "step_time": 0.5} for step in range(1, 5))
    lines = [{"step": 0, "eval/loss": 4.5}, *steps, {"step": 4, "eval/loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_lines_of_a_run_that_is_not_running(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("step 4 of 8, not finished; the same command resumes it")
    assert "step 4/8: loss 1, lr 0.1, 00:02 left" in lines and "step 4: eval/loss not finite" in lines
    assert cli.main(["watch", str(run / "nowhere")]) == 2


def test_running_run_is_followed_to_its_end(workspace: Workspace) -> None:
    process = workspace.start("run", "sft.yaml", "max_steps=60")
    wait_until(Path("out/metrics.jsonl").is_file, process)
    result = workspace.run_tune("watch", "out")
    process.join()
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in result.out.splitlines() if "/60: loss" in line]
    assert result.code == process.exitcode == 0, result.err + workspace.log
    assert steps == sorted(set(steps)) and steps[-1] == 60 and len(steps) > 5
    assert result.out.splitlines()[-1] == "out: finished after step 60 of 60"


def test_screen_fits_the_terminal(run: Path) -> None:
    for columns, rows in ((100, 30), (40, 6), (20, 6)):
        lines = format_screen(read_run(run), ScreenSize(columns, rows))
        assert len(lines) < rows and max(map(len, lines)) <= columns
    lines = format_screen(read_run(run), ScreenSize(100, 30))
    assert "\x1b" not in "".join(lines) and "[###############---------------] step 4 of 8" in lines[1]
    (loss,) = (line for line in lines if line.startswith("loss"))
    assert loss.split()[1] == "1" and (loss.split()[2][0], loss.split()[2][-1]) == (BARS[-1], BARS[0])


@pytest.fixture
def server(run: Path) -> Iterator[ReportServer]:
    with ReportServer(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def request(server: ReportServer, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body


def test_server_answers_with_the_page_only(server: ReportServer, run: Path) -> None:
    status, page = request(server)
    assert status == 200 and '"reload":0' in page and "default-src 'none'" in page
    assert request(server, method="HEAD") == (200, "")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 0.125}\n')
    assert "0.125" in request(server)[1]
    assert request(server, Host=f"localhost:{server.server_port}")[0] == 200
    for path in ("/metrics.jsonl", "/../config.yaml", "/?", "/favicon.ico"):
        assert request(server, path)[0] == 404
    assert request(server, Host="attacker.example")[0] == 403
    assert request(server, method="POST")[0] == 501
    (run / "config.yaml").unlink()
    status, message = request(server)
    assert status == 500 and "no run directory" in message and "\n" not in message


def test_port_in_use_is_an_error(server: ReportServer, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(run), "--port", str(server.server_port)]) == 2
    assert "--port: cannot listen on" in capsys.readouterr().err


def test_ctrl_c_ends_the_server(workspace: Workspace) -> None:
    Path("out").mkdir()
    Path("out/config.yaml").write_text("recipe: sft\n")
    process = workspace.start("watch", "out", "--port", "0")
    wait_until(lambda: Path("log").is_file() and "report at http://127.0.0.1:" in workspace.log, process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(30)
    assert process.exitcode == 130 and "Traceback" not in workspace.log
