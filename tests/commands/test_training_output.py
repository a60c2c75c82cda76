"""The output of a training run: an old one is there until the new has a checkpoint, and one run writes at a time."""

import json
import logging
import os

import pytest

from shortlist.commands import train as command
from shortlist.commands.train import TrainResult, train
from shortlist.commands.training_output import LOCK_FILE, TrainingOutput
from shortlist.errors import ConfigError, NonFiniteError, OutputExistsError, ShortlistError
from shortlist.settings import TrainConfig
from shortlist.training.checkpoints import STATE, TRAINER_STATE, checkpoint_path

fcntl = pytest.importorskip("fcntl")


class Job:
    """Stands for the training: writes a checkpoint and a model, and fails where it is told to."""

    fail_at = None
    model = "old"

    def __init__(self, config):
        self.checksums = {"corpus.jsonl": "0"}
        if self.fail_at == "input":
            raise ConfigError("the input is wrong")

    def run(self, output, *, resume, saved):
        self.meet("start", output)
        state = checkpoint_path(output, 1) / STATE
        state.mkdir(parents=True)
        (state / TRAINER_STATE).write_text("{}")
        self.meet("saving", output)
        saved()
        self.meet("training", output)
        (output / "model").write_text(self.model)
        return TrainResult(output, 2, 1, {"RR@10": 0.5}), {}

    def meet(self, place, output):
        if self.fail_at == place:
            raise self.error
        if self.fail_at == f"kill {place}":
            # No exception is handled after a kill; the lock goes with the process.
            os._exit(9)

    error = NonFiniteError("the loss of step 1 is nan")


@pytest.fixture
def jobs(monkeypatch):
    """The class of the jobs that `train` makes; `fail_at` and `model` are the test's to set."""

    class Own(Job):
        pass

    monkeypatch.setitem(command.KINDS, "dual_encoder", (lambda: Own, lambda: None))
    return Own


def start(output, **options):
    return train(TrainConfig(), output=output, **options)


def killed(output, jobs, place, **options):
    """The same in a process that ends at `place`."""
    jobs.fail_at = f"kill {place}"
    child = os.fork()
    if child == 0:
        try:
            start(output, **options)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    jobs.fail_at = None


def model(output):
    return (output / "model").read_text()


def siblings(output):
    return sorted(path.name for path in output.parent.iterdir())


@pytest.fixture
def output(tmp_path, jobs):
    """A finished output, to be replaced."""
    start(tmp_path / "runs" / "out")
    jobs.model = "new"
    return tmp_path / "runs" / "out"


@pytest.mark.parametrize("place", ["input", "start", "saving"])
@pytest.mark.parametrize("error", [NonFiniteError("the loss of step 1 is nan"), KeyboardInterrupt()])
def test_an_old_output_outlives_a_run_that_fails_before_its_first_checkpoint(output, jobs, place, error, caplog):
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    jobs.fail_at, jobs.error = place, error
    with pytest.raises(ConfigError if place == "input" else type(error)):
        start(output, overwrite=True)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    assert siblings(output) == ["out"]
    assert ("is back" in caplog.text) == (place != "input")


def test_an_old_output_goes_with_the_first_checkpoint(output, jobs):
    jobs.fail_at = "training"
    with pytest.raises(NonFiniteError):
        start(output, overwrite=True)
    assert siblings(output) == ["out"] and not (output / "model").exists()
    assert json.loads((output / "manifest.json").read_text())["finished"] is False


def test_overwriting_leaves_the_new_output_alone(output):
    start(output, overwrite=True)
    assert model(output) == "new" and siblings(output) == ["out"]
    assert not (output / LOCK_FILE).exists()


@pytest.mark.parametrize("mode", ["plain", "overwrite", "failing", "resume"])
def test_the_run_after_a_kill_decides_about_what_stands_aside(output, jobs, mode, caplog):
    killed(output, jobs, "start", overwrite=True)
    assert siblings(output) == [".out.replaced", "out"] and not (output / "model").exists()
    if mode == "plain":
        with pytest.raises(OutputExistsError, match="holds a training run already"):
            start(output)
        assert "killed before its first checkpoint: the former output is back" in caplog.text
        assert model(output) == "old"
    elif mode == "resume":
        start(output, resume=True)
        assert model(output) == "new"
    elif mode == "overwrite":
        start(output, overwrite=True)
        assert model(output) == "new"
    else:
        jobs.fail_at = "start"
        with pytest.raises(NonFiniteError):
            start(output, resume=True)
        assert model(output) == "old"
    assert siblings(output) == ["out"]


def test_a_kill_after_the_checkpoint_keeps_the_new_run(output, jobs, caplog):
    killed(output, jobs, "saving", overwrite=True)
    assert siblings(output) == [".out.replaced", "out"]
    with caplog.at_level(logging.INFO), pytest.raises(OutputExistsError, match="--resume"):
        start(output)
    assert "what it replaced is removed" in caplog.text
    assert siblings(output) == ["out"] and checkpoint_path(output, 1).is_dir()


@pytest.mark.parametrize("mode", [{}, {"resume": True}])
def test_an_output_that_a_kill_left_under_its_hidden_name_comes_back(output, mode, caplog):
    os.replace(output, output.with_name(".out.replaced"))
    if mode:
        assert start(output, **mode).steps == 2
    else:
        with pytest.raises(OutputExistsError):
            start(output)
    assert model(output) == "old" and "is back" in caplog.text


def test_what_is_no_former_output_is_not_touched(output, jobs):
    foreign = output.with_name(".out.replaced")
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match="is in the way"):
        start(output, overwrite=True)
    assert (foreign / "thesis.txt").read_text() == "mine" and model(output) == "old"
    (output / "config.yaml").unlink()
    with pytest.raises(OutputExistsError):
        start(output, overwrite=True)


@pytest.mark.parametrize("mode", [{}, {"overwrite": True}, {"resume": True}])
def test_a_second_run_into_the_same_output_is_refused(output, jobs, mode):
    first = TrainingOutput(output, TrainConfig(), overwrite=True, resume=False)
    first.check()
    first.begin({"seed": 1, "data": {}, "processes": 1})
    try:
        with pytest.raises(OutputExistsError, match="another run is writing"):
            start(output, **mode)
        assert (output / LOCK_FILE).exists() and (output / "config.yaml").exists()
    finally:
        first.failed()
        first.release()
    assert model(output) == "old" and siblings(output) == ["out"]


def test_of_two_runs_that_found_no_output_one_writes(tmp_path, jobs):
    output, facts = tmp_path / "out", {"seed": 1, "data": {}, "processes": 1}
    first, second = (TrainingOutput(output, TrainConfig(), overwrite=False, resume=False) for _ in range(2))
    first.check()
    second.check()
    assert not output.exists()
    first.begin(facts)
    with pytest.raises(OutputExistsError, match="another run is writing"):
        second.begin(facts)
    second.failed()
    second.release()
    assert (output / "config.yaml").is_file() and (output / LOCK_FILE).is_file()
    first.release()


def test_a_run_that_takes_the_output_meanwhile_keeps_it(output, jobs, caplog):
    """The one that comes second finds another's files under the name, and removes nothing."""
    claim = TrainingOutput(output, TrainConfig(), overwrite=True, resume=False)
    claim.check()
    os.replace(output, output.with_name(".out.replaced"))
    claim._replaces = True
    output.mkdir()
    (output / "theirs").write_text("theirs")
    claim.failed()
    claim.release()
    assert (output / "theirs").read_text() == "theirs" and model(output.with_name(".out.replaced")) == "old"
    assert "could not be put back" in caplog.text


def test_a_killed_run_locks_nobody_out_and_a_finished_one_is_resumed_without_a_lock(output, jobs):
    killed(output, jobs, "training", overwrite=True)
    assert (output / LOCK_FILE).exists()
    for path in output.rglob(TRAINER_STATE):
        path.unlink()
    for path in sorted(output.rglob("checkpoints/**/*"), reverse=True):
        path.rmdir()
    start(output, resume=True)
    assert model(output) == "new" and not (output / LOCK_FILE).exists()
    assert start(output, resume=True).measures == {"RR@10": 0.5}


def test_a_forked_worker_does_not_keep_the_lock(output, jobs):
    claim = TrainingOutput(output, TrainConfig(), overwrite=True, resume=False)
    claim.check()
    claim.begin({"seed": 1, "data": {}, "processes": 1})
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # a data loader's worker that outlives the run
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    claim.failed()
    for descriptor in claim._held.values():
        os.close(descriptor)
    claim._held.clear()
    start(output, overwrite=True)
    os.close(write)
    os.waitpid(child, 0)
    assert model(output) == "new"


@pytest.mark.parametrize("joined", [True, False])
def test_a_process_that_is_gone_is_told_in_a_sentence(tmp_path, jobs, monkeypatch, joined):
    from shortlist.training import distributed

    monkeypatch.setattr(distributed, "start", lambda: joined)
    jobs.fail_at, jobs.error = "training", RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: reset by peer")
    with pytest.raises(ShortlistError if joined else RuntimeError, match="--resume" if joined else "Read error"):
        start(tmp_path / "out")
    jobs.error = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        start(tmp_path / "out", overwrite=True)
