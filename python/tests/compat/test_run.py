"""Programs that ``hoistway.run`` starts load with hoistway, without a change of their code."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace

import hoistway
import pytest
from hoistway import run

# A program that knows nothing of hoistway.
PROGRAM = """
import sys
from safetensors import safe_open
from safetensors.numpy import load_file
print(safe_open.__module__, sorted(load_file(sys.argv[1])), type(load_file(sys.argv[1])).__module__)
"""


def start(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hoistway.run", *command],
        env=dict(os.environ, **environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_program_loads_with_hoistway(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = start("--", sys.executable, str(program), str(model))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hoistway.")
    assert "layers.0.bias" in done.stdout
    plain = subprocess.run(
        [sys.executable, "-c", "from safetensors import safe_open; print(safe_open.__module__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not plain.stdout.startswith("hoistway.")


def test_the_command_runs_programs(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "raise SystemExit(7)")
    command = [sys.executable, "-m", "hoistway", "run"]
    done = subprocess.run(
        [*command, "--report", "--", str(program), str(model)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("hoistway.")
    assert re.fullmatch(r"hoistway: \d+ tensors, .*\n", done.stderr), done.stderr
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert helped.stdout == run.USAGE + "\n"


def test_a_script_is_run_by_this_python(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = start("--", str(program), str(model))
    assert done.stdout.startswith("hoistway."), done.stderr
    program.write_text("#!/bin/sh\necho a shell\n")
    program.chmod(0o755)
    assert start("--", str(program)).stdout == "a shell\n"


def test_a_report_says_how_all_files_came(model: Path) -> None:
    plain = start("--", sys.executable, "-c", PROGRAM, str(model))
    assert "hoistway:" not in plain.stderr
    done = start("--report", "--", sys.executable, "-c", PROGRAM, str(model), HOISTWAY_ROUTE="threads")
    assert done.returncode == 0, done.stderr
    # The program loads its file twice.
    count = 2 * len(hoistway.open(model).keys())
    assert re.search(
        rf"^hoistway: {count} tensors, .*iB from 2 files in \d+\.\d\d s of loading \(.*B/s\): threads \w+ 100%$",
        done.stderr,
        re.MULTILINE,
    ), done.stderr
    nothing = start("--report", sys.executable, "-c", "import hoistway")
    assert nothing.stderr == "hoistway: no checkpoint was loaded\n"


def test_so_do_the_processes_that_it_starts(model: Path) -> None:
    command = f"[sys.executable, '-c', {PROGRAM!r}, sys.argv[1]]"
    child = f"import subprocess, sys; sys.exit(subprocess.run({command}).returncode)"
    done = start(sys.executable, "-c", child, str(model))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hoistway.")


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (["-I"], "-I"),
        (["-E"], "-E"),
        (["-sIu"], "-I"),
        (["-W", "ignore", "-Xutf8", "-BE"], "-E"),
        (["-X", "IE", "-B"], None),
        (["-XI"], None),
        (["-uS"], "-S"),
        (["-u"], None),
    ],
)
def test_a_python_that_ignores_the_environment_is_told_of(flags: list[str], flag: str | None) -> None:
    done = start("--", "env", sys.executable, *flags, "-c", "print('-I', '-E')", "-I")
    assert done.stdout == "-I -E\n"
    if flag is None:
        assert not done.stderr
    else:
        assert f"hoistway.run: {flag} keeps Python from importing what replaces safetensors" in done.stderr


def test_flags_in_the_first_line_of_a_script_are_told_of(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(f"#!{sys.executable} -E\nprint('it ran')\n")
    script.chmod(0o755)
    done = start("--", str(script))
    assert done.stdout == "it ran\n"
    assert "hoistway.run: -E keeps Python from importing what replaces safetensors" in done.stderr


def test_flags_of_a_python_that_a_script_starts_are_told_of(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(f"#!{sys.executable}\nimport os, sys\nos.execv(sys.argv[1], sys.argv[1:])\n")
    script.chmod(0o755)
    done = start("--", str(script), sys.executable, "-I", "-c", "print('it ran')")
    assert done.stdout == "it ran\n"
    assert "hoistway.run: -I keeps Python from importing what replaces safetensors" in done.stderr


def test_a_drop_in_that_ends_its_import_meanwhile_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []

    class DropIn(ModuleType):
        """Ends its import between two looks at it."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__("install", lambda: installed.append(name))
            super().__setattr__(name, value)

    monkeypatch.delenv("HOISTWAY_SAFETENSORS", raising=False)
    monkeypatch.setitem(sys.modules, "hoistway.compat.safetensors", DropIn("hoistway.compat.safetensors"))
    path = Path(hoistway.__file__).parent / "_hook" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("hook", path)
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    hook._Loader(SimpleNamespace(exec_module=lambda module: None), None).exec_module(
        ModuleType("safetensors")
    )
    assert installed == ["_is_awaited"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_functions_reach_the_processes_of_a_pool(model: Path, method: str) -> None:
    # With nothing but safetensors in it, as programs are written.
    program = """
        import multiprocessing, sys
        from concurrent.futures import ProcessPoolExecutor
        from safetensors.numpy import load_file
        context = multiprocessing.get_context(sys.argv[1])
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            loaded, = pool.map(load_file, sys.argv[2:])
        # What hoistway loads is pickled as this.
        print(type(loaded).__name__, "layers.0.bias" in loaded)
        """
    done = start("--", sys.executable, "-c", textwrap.dedent(program), method, str(model))
    assert done.stdout == "OrderedDict True\n", done.stderr


def test_options_come_from_the_environment(model: Path) -> None:
    done = start("--", sys.executable, "-c", PROGRAM, str(model), HOISTWAY_ROUTE="sideways")
    assert done.returncode != 0
    assert "sideways" in done.stderr
    assert "HOISTWAY_ROUTE" in done.stderr


def test_a_program_without_safetensors_imports_nothing_of_hoistway() -> None:
    done = start(
        "--", sys.executable, "-c", "import sys; print([name for name in sys.modules if 'hoistway' in name])"
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_program_that_looks_for_safetensors_first_loads_with_hoistway(model: Path) -> None:
    """As diffusers does."""
    code = "import importlib.util; importlib.util.find_spec('safetensors')" + PROGRAM
    done = start("--", sys.executable, "-c", code, str(model))
    assert done.stdout.startswith("hoistway."), done.stderr


@pytest.mark.parametrize(
    "imports",
    [
        "from hoistway.compat.safetensors import safe_open",
        "import hoistway.compat.safetensors; hoistway.compat.safetensors.install()",
        "from hoistway.compat.safetensors.numpy import load_file",
    ],
)
def test_a_program_may_import_the_drop_in_itself(model: Path, imports: str) -> None:
    done = start("--", sys.executable, "-c", f"{imports}\n{PROGRAM}", str(model))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hoistway.")


def test_an_empty_entry_of_the_path_stays_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/elsewhere"]))
    assert run.environment()["PYTHONPATH"] == os.pathsep.join([run.HOOK, "", "/elsewhere"])
    monkeypatch.setenv("PYTHONPATH", "")
    assert run.environment()["PYTHONPATH"] == run.HOOK


def test_a_python_without_hoistway_says_so(tmp_path: Path) -> None:
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import safetensors"
    done = start(
        "--",
        sys.executable,
        "-S",
        "-E",
        "-c",
        f"import sys; sys.path.insert(0, {run.HOOK!r}); import sitecustomize; {code}",
    )
    assert done.returncode != 0
    assert "HOISTWAY_SAFETENSORS=1 asks for hoistway" in done.stderr
    assert "unset the variable" in done.stderr


def test_the_sitecustomize_of_the_user_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; print(os.environ.get('HOISTWAY_SAFETENSORS'))")
    done = start("--", sys.executable, "-c", "", PYTHONPATH=str(tmp_path))
    # First in the process that becomes the program.
    assert done.stdout == "None\n1\n", done.stderr


def test_a_hook_that_is_there_already_is_not_added_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([run.HOOK, "/elsewhere"]))
    assert run.environment()["PYTHONPATH"] == os.pathsep.join([run.HOOK, "/elsewhere"])


@pytest.mark.parametrize(
    ("command", "said", "code"),
    [
        ((), "usage:", 2),
        (("--",), "usage:", 2),
        (("--repot", "--", "true"), "'--repot' is no option", 2),
        (("--", "no-such-program"), "cannot be run", 3),
    ],
)
def test_what_cannot_be_run_is_said(command: tuple[str, ...], said: str, code: int) -> None:
    done = start(*command)
    assert done.returncode == code
    assert said in done.stderr
