"""Progress: nothing before 3 s, a line on a terminal, log lines elsewhere; one inside another tells the outer one."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable

import pytest

from attn_pass.report import progress as module
from attn_pass.report.progress import logged_to_stderr, progress, tell


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)


def until(is_so: Callable[[], object]) -> bool:
    end = time.monotonic() + 10
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(is_so())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_over_soon_shows_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    with caplog.at_level(logging.INFO, "attn_pass.progress"):
        with progress() as told:
            told("quick")
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress() as told:
            told("quick")
    assert not caplog.messages and not terminal.getvalue()


def test_elsewhere_log_lines_tell_what_is_being_done(soon: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "attn_pass.progress"):
        with progress() as told:
            told("first")
            assert until(lambda: caplog.messages)  # while the first is still under way
            told("second")
            told("second")
        tell("nobody listens")
    assert [m.split(": ", 1)[1] for m in caplog.messages] == ["first", "second"]


def test_on_a_terminal_a_line_changes_and_goes(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress() as told:
        told("compiling [stock]")
        assert until(lambda: "compiling [stock]" in terminal.getvalue())
        told("timing")
        assert until(lambda: "timing" in terminal.getvalue())
    assert "\n" not in terminal.getvalue().rpartition("timing")[2].strip("\n")


def test_one_inside_another_tells_the_outer_one(soon: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "attn_pass.progress"):
        with progress() as outer:
            outer("a benchmark")
            assert until(lambda: caplog.messages)
            with progress() as inner:
                inner("tuning in it")
            tell("from below")
        with progress(silent=True), progress() as inner:
            inner("not wanted")
            tell("nor this")
            time.sleep(0.05)
    assert [m.split(": ", 1)[1] for m in caplog.messages] == ["a benchmark", "tuning in it", "from below"]


def test_a_command_writes_log_lines_to_stderr(soon: None, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("attn_pass.progress")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with logged_to_stderr(), progress() as told:
        told("compiling")
        time.sleep(0.2)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("attn-pass: 0 s: compiling")
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_an_error_comes_through_and_ends_it(soon: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "attn_pass.progress"):
        with pytest.raises(ValueError), progress() as told:
            told("work")
            raise ValueError
        time.sleep(0.05)
    assert not caplog.messages
