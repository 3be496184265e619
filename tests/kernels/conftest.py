"""Kernel tests run on the CPU, in one child process whose Triton interprets.

Triton reads TRITON_INTERPRET when a kernel is defined, and other tests may have imported it before. So every test that
asks for the fixture `interpreted` is run by a child pytest, started at the first of them; the child sends each report
as it comes, and it is shown here as that test's own. A child that dies fails the tests it did not reach.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import interpreter

_HERE = Path(__file__).parent
_REPORT_FD = "DELTAMESH_KERNEL_REPORTS"
_CHILD = pytest.StashKey["_Child"]()


@pytest.fixture(scope="session")
def interpreted() -> None:
    """Kernels may be called: Triton interprets, and what its interpreter lacks is filled in."""
    interpreter.activate()


def _in_child() -> bool:
    return _REPORT_FD in os.environ


def _runs_in_child(item: pytest.Item) -> bool:
    return _HERE in item.path.parents and "interpreted" in getattr(item, "fixturenames", ())


class _Child:
    """A pytest that runs `items` and sends their reports through a pipe."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.config = config
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        read_fd, write_fd = os.pipe()
        environment = os.environ | {"TRITON_INTERPRET": "1", _REPORT_FD: str(write_fd)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(item.nodeid for item in items)],
            cwd=config.rootpath,
            env=environment,
            pass_fds=(write_fd,),
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        os.close(write_fd)
        self.pipe = os.fdopen(read_fd)

    def reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """Reports of `item`, which is the next one in the child's order, until its teardown."""
        for line in self.pipe:
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=json.loads(line))
            if report.nodeid != item.nodeid:
                continue
            yield report
            if report.when == "teardown":
                return
        code = self.process.wait(timeout=30)  # the pipe has ended, so the process is ending
        self.output.seek(0)
        tail = self.output.read().decode(errors="replace")[-4000:]
        yield pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"the child process ended with code {code} without running this test:\n{tail}",
            when="call",
        )

    def close(self) -> None:
        self.pipe.close()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        self.output.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if _in_child() or not _runs_in_child(item):
        return None
    stash = item.session.stash
    if _CHILD not in stash:
        stash[_CHILD] = _Child(item.config, [i for i in item.session.items if _runs_in_child(i)])
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in stash[_CHILD].reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The test before, if it ran here, left set up what it shares with this one; nothing else would end that.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _in_child():
        # `config` is not an argument of this hook; to_serializable needs none for test reports.
        data: dict[str, Any] = report._to_json() | {"$report_type": "TestReport"}
        os.write(int(os.environ[_REPORT_FD]), (json.dumps(data) + "\n").encode())


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _CHILD in session.stash:
        session.stash[_CHILD].close()
