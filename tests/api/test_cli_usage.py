"""The command line refuses what cannot be, in one paragraph, with a non-zero status, and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deltamesh.cli import COMMANDS, main
from deltamesh.cli.arguments import parse_topology
from deltamesh.cli.config import DataConfig, HumanEvalConfig, TrainConfig
from deltamesh.cli.config_reader import make_parser, read_config
from deltamesh.topology import Topology

ROW = {"tokens": [1, 2, 3, 4]}


def _config(folder: Path, *lines: str, data: str = "data.jsonl") -> Path:
    path = folder / "config.yaml"
    head = [f"run_directory: {folder / 'run'}", "data:", f"  path: {folder / data}"]
    path.write_text("\n".join([*head, *(lines or ("steps: 2",))]) + "\n")
    (folder / "data.jsonl").write_text(json.dumps(ROW) + "\n")
    return path


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 1) -> str:
    """The message of a command that is refused: one paragraph, no traceback."""
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    return captured.err


# ---------------------------------------------------------------- the command itself


def test_every_command_of_the_table_exists_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        assert f"usage: deltamesh {command}" in capsys.readouterr().out


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from deltamesh.cli import main\n"
        "for words in (['--help'], ['train', '--help'], ['probe', '--help'], ['verify', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'peft'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_an_unknown_command_is_refused_with_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'train'?" in _refused(capsys, "trian", status=2)


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(command in shown for command in COMMANDS)


# ---------------------------------------------------------------- configuration


def test_options_override_the_file_wherever_they_stand(tmp_path: Path) -> None:
    path = str(_config(tmp_path, "steps: 2", "optimizer: {learning_rate: 0.5}", "lora: {r: 4}"))
    options = ["--steps=7", "--optimizer.eps", "1e-3", "--lora.use_rslora", "true"]
    for arguments in ([path, *options], [*options, path]):
        config = read_config(arguments, make_parser("deltamesh train", ""))
        assert (config.steps, config.optimizer.eps, config.optimizer.learning_rate) == (7, 1e-3, 0.5)
        assert config.lora is not None
        assert (config.lora.r, config.lora.use_rslora) == (4, True)


def test_the_written_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = TrainConfig(run_directory="x", epochs=2, data=DataConfig(human_eval=HumanEvalConfig(num_edits=2)))
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert read_config([str(path)], make_parser("deltamesh train", "")) == config


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stepz: 3", "unknown key 'stepz', did you mean steps?"),
        ("topology: {ttp: 2}", "unknown key 'topology.ttp', did you mean topology.tp?"),
        ("learning_rate: 1e-3", "did you mean optimizer.learning_rate?"),
        ("optimizer: {lr: 1}", "unknown key 'optimizer.lr' (optimizer has: learning_rate, "),
        ("steps: many", "steps=many is not int | null"),
        ("steps: 0", "steps=0 cannot be; use at least 1"),
        ("dtype: float8", "dtype=float8 is not one of ['float32', 'float64', 'bfloat16']"),
        ("optimizer: {beta2: 1.0}", "optimizer.beta2=1.0 cannot be"),
        ("epochs: 3\nsteps: 3", "steps=3 and epochs=3: give exactly one of them"),
        ("lora: {target_modules: [q_prj]}\nsteps: 2", "matches no linear layer; available are"),
        ("lora: {r: 0}\nsteps: 2", "r=0: must be at least 1"),
        ("topology: {tp: 3}\nsteps: 2", "tp=3 does not divide linear_num_key_heads=4; use tp in {1, 2, 4}"),
        ("topology: {cp: 2, tp: 2}\nprocesses: 6\nsteps: 2", "cp=2 x tp=2 = 4 does not divide the world size 6"),
        ("topology: {dp: 1, cp: 2}\nprocesses: 4\nsteps: 2", "needs 2 ranks, but the world has 4"),
        ("topology: {cp: -1}\nsteps: 2", "cp=-1 is not a positive integer"),
        ("model: ./nowhere\nsteps: 2", "nowhere does not exist"),
        ("steps: [", "is not valid YAML"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    path = _config(tmp_path, *line.split("\n"))
    assert main(["train", str(path)]) in (1, 2)
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert not (tmp_path / "run").exists()


def test_a_missing_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such configuration file" in _refused(capsys, "train", str(tmp_path / "none.yaml"))
    assert "CONFIG, a YAML file, must be given" in _refused(capsys, "train", status=2)


def test_an_unknown_option_is_refused_with_the_closest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(_config(tmp_path))
    assert "did you mean --topology.tp?" in _refused(capsys, "train", path, "--topology.ttp", "2", status=2)


# ---------------------------------------------------------------- data and run directory


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"tokens": [1, 2]}\n{"tokns": [1]}', "data.jsonl:2: unknown field 'tokns', did you mean 'tokens'?"),
        ('{"tokens": [1, 2]}\n{"tokens": [1, 2', "data.jsonl:2: truncated JSON"),
        ('{"tokens": [1, 700]}', "data.jsonl:1: tokens[1]: token id 700 is outside the vocabulary [0, 259)"),
        ("", "the file is empty"),
    ],
)
def test_data_that_cannot_be_used_is_refused_with_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    path = _config(tmp_path)
    (tmp_path / "data.jsonl").write_text(content)
    assert message in _refused(capsys, "train", str(path))
    assert not (tmp_path / "run").exists()


def test_a_missing_data_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _config(tmp_path, data="none.jsonl")
    assert "none.jsonl: No such file or directory" in _refused(capsys, "train", str(path))
    assert not (tmp_path / "run").exists()


def test_an_existing_run_directory_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _config(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("mine\n")
    assert "exists already; give another run_directory" in _refused(capsys, "train", str(path))
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "mine\n"


# ---------------------------------------------------------------- topologies


def test_topologies_are_read_from_names_and_from_digits() -> None:
    assert parse_topology("cp=2, tp=2") == parse_topology("122") == Topology(cp=2, tp=2)
    assert parse_topology("tp=2,sp=off") == Topology(tp=2, sp=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cp=2,pt=2", "unknown name 'pt', did you mean 'tp'?"),
        ("cp", "'cp' is not NAME=VALUE"),
        ("cp=", "'cp=' is not NAME=VALUE"),
        ("cp=two", "cp=two is not a positive integer"),
        ("cp=0", "cp=0 is not a positive integer"),
        ("cp=2,cp=2", "cp stands twice"),
        ("sp=maybe", "sp=maybe is neither on nor off"),
        ("102", "cp=0 is not a positive integer"),
    ],
)
@pytest.mark.parametrize("command", ["probe", "verify"])
def test_a_topology_that_cannot_be_read_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, text: str, message: str
) -> None:
    assert message in _refused(capsys, command, "tiny", "--topology", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--processes", "4", "--cp", "2", "--tp", "3"), "cp=2 x tp=3 = 6 does not divide the world size 4"),
        (("--processes", "4", "--topology", "cp=2"), "needs 2 ranks, but the world has 4"),
        (("--tp", "8"), "tp=8 does not divide linear_num_key_heads=4; use tp in {1, 2, 4}"),
        (("--topology", "cp=2", "--tp", "2"), "give one of them"),
        (("--steps", "0"), "--steps 0 is not positive"),
        (("--processes", "0"), "processes=0 is not positive"),
        (("--dtype", "float8"), "invalid choice: 'float8'"),
    ],
)
def test_a_probe_that_cannot_be_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["probe", "tiny", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err


def test_verify_refuses_a_json_file_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    path.write_text("mine")
    assert "give a file that does not exist yet" in _refused(capsys, "verify", "--json", str(path))
    assert path.read_text() == "mine"
