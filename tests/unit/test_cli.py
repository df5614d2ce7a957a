"""The command line as a whole: what goes to which stream, exit codes, options out of a config, lazy commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from kvdir.cli.bench import run_bench
from kvdir.cli.main import Entry, LazyGroup, main
from kvdir.cli.options import config_options, configuration_page
from kvdir.cli.output import (
    CommandFailed,
    Exit,
    emit,
    emit_items,
    exit_for,
    facts,
    output_option,
    progress_bar,
    stack,
    starting,
    table,
)
from kvdir.config import setting
from kvdir.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    KvdirError,
    NamespaceError,
    NoSpace,
    Unavailable,
    UnknownNamespace,
    UntrustedView,
)


@dataclass(frozen=True, slots=True)
class Example:
    """Settings of the command below."""

    listen: str = setting("127.0.0.1:0", "Where to listen | and more.")
    arena_bytes: int = setting(1024, "Size of the arena.")
    peers: tuple[str, ...] = setting((), "Peers.")
    insecure: bool = setting(False, "Allow plaintext.")


@click.command()
@output_option
@config_options(Example, prefix="EX_")
def show(config: Example, output: str) -> None:
    """Shows its configuration."""
    emit(
        config,
        lambda: stack(facts({"listen": config.listen}), table(["peer", "n #"], [[p, 1] for p in config.peers])),
        output=output,
    )


def program(function: Callable[..., None] | None = None) -> click.Group:
    group = LazyGroup("program", lazy={"lazy": Entry("json:dumps", "Never imported here.", "Some")})
    group.add_command(show)
    if function is not None:
        group.add_command(click.command("run")(output_option(function)))
    return group


def run(group: click.Group, *arguments: str, **kwargs: Any) -> Result:
    return CliRunner().invoke(group, list(arguments), **kwargs)


def raising(error: Exception) -> click.Group:
    def command(output: str) -> None:
        raise error

    return program(command)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KvdirError("x"), Exit.FAILED),
        (UnknownNamespace("x"), Exit.FAILED),
        (InvalidInput("x"), Exit.USAGE),
        (NamespaceError(["x"]), Exit.USAGE),
        (ConfigError(["x"]), Exit.START),
        (NoSpace("x"), Exit.START),
        (Unavailable("x"), Exit.UNREACHABLE),
        (DeadlineExceeded("x"), Exit.UNREACHABLE),
        (UntrustedView("x"), Exit.UNTRUSTED),
        (CommandFailed("x", exit=Exit.UNTRUSTED), Exit.UNTRUSTED),
    ],
)
def test_error_ends_with_its_exit_code_and_words_on_stderr(error: KvdirError, code: Exit) -> None:
    assert exit_for(error) is code
    result = run(raising(error), "run")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == f"error: {error}\n"


def test_error_is_one_json_document_when_output_is_json() -> None:
    result = run(raising(Unavailable("no coordinator at x")), "run", "--output", "json")
    assert json.loads(result.stdout) == {"error": "no coordinator at x", "code": "unavailable", "retriable": True, "exit": 4}
    assert "error: no coordinator" in result.stderr


def test_stdout_keeps_one_document_when_the_command_fails_after_its_answer() -> None:
    def command(output: str) -> None:
        emit({"corrupt": 1}, lambda: "x", output=output)
        raise CommandFailed("corrupt blocks")

    result = run(program(command), "run", "--output", "json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, {"corrupt": 1})


def numbers(*, fail_at: int) -> Iterator[dict[str, int]]:
    for number in range(3):
        if number == fail_at:
            raise Unavailable("gone")
        yield {"n": number}


@pytest.mark.parametrize(
    ("fail_at", "document", "lines"),
    [
        (3, {"items": [{"n": 0}, {"n": 1}, {"n": 2}]}, "0\n1\n2\n"),
        (1, {"items": [{"n": 0}], "error": "gone"}, "0\n"),
        (0, {"error": "gone", "code": "unavailable", "retriable": True, "exit": 4}, ""),
    ],
)
def test_streamed_answer_stays_one_document_when_it_breaks_off(fail_at: int, document: object, lines: str) -> None:
    def command(output: str) -> None:
        emit_items(numbers(fail_at=fail_at), key="items", line=lambda item: str(item["n"]), output=output)

    result = run(program(command), "run", "--output", "json")
    assert json.loads(result.stdout) == document
    assert result.exit_code == (Exit.OK if fail_at == 3 else Exit.UNREACHABLE)
    assert run(program(command), "run").stdout == lines


def test_bug_keeps_its_traceback() -> None:
    result = run(raising(ZeroDivisionError("bug")), "run")
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize("error", [OSError(98, "Address already in use"), Unavailable("x")])
def test_any_expected_error_means_start_failure_while_starting(error: Exception) -> None:
    def command(output: str) -> None:
        with starting("coordinator"):
            raise error

    result = run(program(command), "run")
    assert result.exit_code == Exit.START
    assert "coordinator cannot start" in result.stderr


def test_usage_error_has_exit_code_2() -> None:
    assert run(program(), "show", "--nonsense").exit_code == Exit.USAGE
    assert run(program(), "nothing").exit_code == Exit.USAGE
    assert run(program(), "show", "--output", "xml").exit_code == Exit.USAGE


def test_answer_has_no_escape_codes_when_stdout_is_no_terminal() -> None:
    result = run(program(), "show", "--peers", "a:1", color=False)
    assert "\x1b" not in result.stdout
    assert "127.0.0.1:0" in result.stdout
    assert "a:1" in result.stdout


def test_flags_become_the_config_and_lists_take_commas_or_repeats() -> None:
    arguments = ["--peers", "a:1,b:2", "--peers", "c:3", "--arena-bytes", "2KiB", "--insecure"]
    result = run(program(), "show", "--output", "json", *arguments)
    assert json.loads(result.stdout) == {
        "listen": "127.0.0.1:0",
        "arena_bytes": 2048,
        "peers": ["a:1", "b:2", "c:3"],
        "insecure": True,
    }


def test_every_bad_setting_is_named_at_once_with_exit_code_3() -> None:
    result = run(program(), "show", "--arena-bytes", "many", env={"EX_LISTN": "x", "EX_INSECURE": "maybe"})
    assert result.exit_code == Exit.START
    for expected in ("--arena-bytes", "EX_LISTN", "EX_INSECURE"):
        assert expected in result.stderr


def test_print_config_says_where_each_value_comes_from() -> None:
    result = run(program(), "show", "--print-config", "--output", "json", "--listen", "x:1", env={"EX_PEERS": "a"})
    document = json.loads(result.stdout)
    assert document["listen"] == {"value": "x:1", "source": "flag"}
    assert document["peers"] == {"value": ["a"], "source": "environment"}
    assert document["arena_bytes"]["source"] == "default"
    assert "environment" in run(program(), "show", "--print-config", env={"EX_PEERS": "a"}).stdout


def test_help_of_a_setting_has_default_and_variable() -> None:
    text = " ".join(run(program(), "show", "--help").stdout.split())
    assert "--arena-bytes SIZE" in text
    assert "[default: 1.0 KiB; EX_ARENA_BYTES]" in text
    assert "--insecure / --no-insecure" in text


def test_configuration_page_lists_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("kvdir_example")
    module.show = show  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvdir_example", module)
    page = configuration_page(["kvdir_example:show"])
    assert "| `arena_bytes` | 1.0 KiB | `--arena-bytes`, `EX_ARENA_BYTES` | Size of the arena. |" in page
    assert "listen \\| and more" in page


def test_progress_is_silent_when_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("work", 3) as advance:
        advance()
        advance(2, "text")
    assert capsys.readouterr() == ("", "")


def test_bench_prints_figures_rows_and_the_machine_they_were_measured_on() -> None:
    shares = []

    def measure(advance: Callable[..., None]) -> dict[str, Any]:
        advance(0.5, "half")
        shares.append(0.5)
        return {"blocks_per_s": 1234567.8, "rows": [{"plane": "shm", "p50_us": 1.23456}, {"plane": "tcp", "p50_us": None}]}

    def command(output: str) -> None:
        run_bench("example", measure, output=output, progress=False)

    document = json.loads(run(program(command), "run", "--output", "json").stdout)
    assert (document["bench"], document["blocks_per_s"], len(document["rows"])) == ("example", 1234567.8, 2)
    assert {"cpu", "cores", "load_1m", "python"} <= set(document["machine"])
    shown = run(program(command), "run").stdout
    for expected in ("1,234,568", "1.235", "shm", "cores"):
        assert expected in shown
    assert shares == [0.5, 0.5]


def test_help_lists_commands_without_importing_them() -> None:
    result = run(program(), "--help")
    assert "Never imported here." in result.stdout


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environ}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=50, check=False, env=env)


def test_help_of_the_program_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom kvdir.cli.main import main\n"
        "result = CliRunner().invoke(main, ['--help'])\n"
        "print(result.exit_code, sorted({'grpc', 'numpy', 'rich', 'kvdir.index', 'torch'} & set(sys.modules)))"
    )
    assert python("-c", code).stdout == "0 []\n"


def test_importing_kvdir_pulls_in_neither_grpc_nor_torch() -> None:
    code = "import sys, kvdir; print(sorted({'grpc', 'torch', 'numpy', 'google'} & set(sys.modules)))"
    assert python("-c", code).stdout == "[]\n"


def test_help_teaches_with_examples_and_exit_codes() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for expected in ("Examples:", "Exit codes: 0 ok", "serve", "nodes", "trust", "lookup", "dump", "replay", "bench"):
        assert expected in result.stdout


@pytest.mark.parametrize("module", ["kvdir", "peer_agent"])
def test_version_names_what_a_report_needs(module: str) -> None:
    result = python("-m", module, "--version")
    assert result.returncode == 0
    for expected in ("python", "grpcio", "protobuf", "native"):
        assert expected in result.stdout


def test_no_color_wins_over_forced_colours() -> None:
    code = (
        "import sys\nfrom kvdir.cli.output import emit, table\n"
        "emit({}, lambda: table(['a'], [['b']], title='t'), output='table')"
    )
    assert "\x1b" not in python("-c", code, NO_COLOR="1", FORCE_COLOR="1").stdout
