"""A run goes on as what it was, loses nothing, and says what it will not do."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import train
from conftest import arguments, error_of, read_metrics, same_weights
from machinery.run import Run, load_run


@pytest.fixture
def run(pair, tmp_path):
    """A run of two rollouts, on small batches."""
    train.main(arguments(pair, tmp_path / "run", rollouts=2))
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"
    }


def test_rates_given_on_resume_act(run, monkeypatch):
    rates = []
    plain = Run.log

    def noted(self, step, rollout):
        rates.append({k: self.learner.optimizer.param_groups[0][k] for k in ("lr", "weight_decay")})
        plain(self, step, rollout)

    monkeypatch.setattr(Run, "log", noted)
    new = ["--learning_rate", "1e-9", "--weight_decay", "0.5", "--rollouts", "3"]
    train.main(["--resume", str(run), *new])
    assert rates == [{"lr": 1e-9, "weight_decay": 0.5}]
    assert read_metrics(run)[-1]["learning_rate"] == 1e-9


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--lora_rank", 4), ("--seed", 1), ("--credit", "grpo"), ("--group_size", 2), ("--band", 2)]
    + [("--policy", "other"), ("--prompts", "p.jsonl"), ("--temperature", 0.5), ("--epochs", 2)]
    + [("--preset", "tiny-sharp"), ("--output_dir", "elsewhere"), ("--beta", 0)],
)
def test_flags_that_make_another_experiment_are_refused_by_name_and_nothing_is_written(
    run, flag, value
):
    before = contents(run)
    assert f"{flag} {value}" in error_of(["--resume", str(run), flag, str(value)])
    assert contents(run) == before
    train.main(["--resume", str(run), "--rollouts", "3"])


def test_a_checkpoint_given_in_place_of_its_run_names_the_run(run):
    message = error_of(["--resume", str(run / "checkpoint-2")])
    assert f"give the run folder: {run}" in message


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_truncated_checkpoint_is_a_line_and_changes_nothing(run, file):
    broken = run / "checkpoint-2" / file
    broken.write_bytes(broken.read_bytes()[:100])
    before = contents(run)
    message = error_of(["--resume", str(run), "--rollouts", "3"])
    assert "checkpoint-2 cannot be read" in message
    assert contents(run) == before


def test_a_config_of_another_version_is_a_line(run):
    flags = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(flags | {"magic": 1}))
    assert "flags that this version does not know: magic" in error_of(["--resume", str(run)])


def test_two_processes_never_share_a_run_folder_and_a_killed_one_leaves_no_lock(run):
    script = """
        import sys, time
        from pathlib import Path
        from machinery.run import lock
        held = lock(Path(sys.argv[1]))
        print("held", flush=True)
        time.sleep(60)
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(run)], stdout=subprocess.PIPE
    )
    other.stdout.readline()
    assert "in use" in error_of(["--resume", str(run), "--rollouts", "3"])
    other.kill()
    other.wait()
    train.main(["--resume", str(run), "--rollouts", "3"])
    assert len(read_metrics(run)) == 3


def test_a_run_goes_on_from_any_directory(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(pair)
    relative = {
        "--policy": "policy",
        "--reward_model": "reward_model",
        "--prompts": "prompts.jsonl",
    }
    flags = [x for both in relative.items() for x in both]
    train.main([*arguments(pair, tmp_path / "run", rollouts=2), *flags])
    monkeypatch.chdir(tmp_path)
    config, _ = load_run("run")
    assert os.path.isabs(config.policy) and os.path.isabs(config.prompts)
    shutil.move("run", "moved")
    train.main(["--resume", "moved", "--rollouts", "3"])
    assert len(read_metrics(tmp_path / "moved")) == 3


def test_weights_are_stored_once_per_checkpoint(run):
    names = {p.name for p in (run / "checkpoint-2").iterdir()}
    assert "model.safetensors" in names and "optimizer.pt" in names
    state = torch.load(run / "checkpoint-2" / "optimizer.pt")
    assert set(state) == {"state", "param_groups"}


def test_a_resumed_lora_run_is_the_run_that_was_never_stopped(pair, tmp_path):
    lora = ("--lora_rank", 4, "--learning_rate", 1e-2)
    train.main(arguments(pair, tmp_path / "whole", *lora))
    train.main(arguments(pair, tmp_path / "parts", *lora, rollouts=2))
    train.main(["--resume", str(tmp_path / "parts"), "--rollouts", "4"])
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "parts")


def test_a_full_disk_in_the_log_is_a_line_and_the_checkpoint_stays(pair, tmp_path, monkeypatch):
    plain = Path.open

    def full(self, *args, **kwargs):
        if self.name == "metrics.jsonl" and (tmp_path / "run" / "checkpoint-2").exists():
            raise OSError(28, "No space left on device")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    message = error_of(arguments(pair, tmp_path / "run"))
    assert "metrics.jsonl could not be written" in message and "No space" in message
    monkeypatch.undo()
    train.main(["--resume", str(tmp_path / "run")])
    train.main(arguments(pair, tmp_path / "whole"))
    assert same_weights(tmp_path / "run" / "final", tmp_path / "whole" / "final")


def test_metrics_go_where_report_to_says_or_it_is_refused_with_the_pip_command(
    pair, tmp_path, monkeypatch
):
    class Dashboard:
        rows = []

        @staticmethod
        def init(**settings):
            assert settings["config"]["credit"] == "datc"

        @staticmethod
        def log(row, step):
            Dashboard.rows.append((step, row["reward"]))

    monkeypatch.setitem(sys.modules, "wandb", Dashboard)
    monkeypatch.setitem(sys.modules, "trackio", None)
    train.main(arguments(pair, tmp_path / "run", "--report_to", "wandb", rollouts=2))
    logged = [(row["step"], row["reward"]) for row in read_metrics(tmp_path / "run")]
    assert Dashboard.rows == logged
    message = error_of(arguments(pair, tmp_path / "out", "--report_to", "trackio"))
    assert "pip install trackio" in message


def test_an_unknown_flag_suggests_the_nearest(pair, tmp_path):
    message = error_of(arguments(pair, tmp_path / "out", "--learning_rat", 1))
    assert "Did you mean --learning_rate?" in message
    assert "--seed is" in error_of(arguments(pair, tmp_path / "out", "--seed", 10**30))
