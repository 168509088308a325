"""The training loop: what it measures, when it stops, how held-out samples are counted."""

import signal

import numpy as np
import pytest

import gpunet
from gpunet import mixed_precision
from gpunet.data import Batches, Dataset, load_dataset
from gpunet.distributed import CollectiveError, SingleCommunicator
from gpunet.dtypes import bfloat16
from gpunet.errors import ArgumentError, CheckpointError, DeviceError, ShapeError
from gpunet.training import (
    CheckpointFolder,
    Evaluator,
    Ranks,
    Settings,
    StepLog,
    TrainingError,
    TrainingInterruptedError,
    make_trainer,
)
from gpunet.training.curve import save_curve
from gpunet.training.history import History
from gpunet.training.report import ConsoleReporter, summary
from gpunet.training.trainer import steps_of
from gpunet.zoo import build


def small_dataset(samples=30, test=11):
    rng = np.random.default_rng(2)
    labels = (np.arange(samples) % 3).astype(np.int32)
    images = rng.random((samples, 1, 8, 8), dtype=np.float32)
    images[np.arange(samples), 0, labels] += 1
    return Dataset(images, labels, images[:test], labels[:test], classes=3, name="small")


DATA = small_dataset()


def trainer(data=DATA, **options):
    return make_trainer(
        Settings.of("mlp", 0, **{"epochs": 3, "batch_size": 8, **options}), data, device="cpu"
    )


class Watch:
    """Keeps what is reported, and calls ``then`` after a step."""

    def __init__(self, at=0, then=None):
        self.steps, self.epochs, self.at, self.then = [], [], at, then

    def step(self, step, total, samples):
        self.steps.append((step.step, total, samples))
        if step.step == self.at:
            self.then()

    def epoch(self, epoch, total):
        self.epochs.append((epoch.epoch, total))


def test_steps_and_epochs_are_measured_and_reported():
    one, watch = trainer(), Watch()
    history = one.run(reporter=watch)
    # 3 times 30 samples in batches of 8: the last of 12 batches is filled up from a fourth epoch.
    assert watch.steps == [(i, 12, 8) for i in range(1, 13)]
    assert watch.epochs == [(1, 3), (2, 3), (3, 3)]
    assert [s.epoch for s in history.steps] == [1] * 4 + [2] * 4 + [3] * 4
    assert history.steps[0].loss == pytest.approx(np.log(3), abs=1)
    assert history.epochs[-1].test_accuracy == 1
    assert history.epochs[0].loss == pytest.approx(np.mean([s.loss for s in history.steps[:4]]))
    rates = [s.learning_rate for s in history.steps]
    expected = [0.1 * (1 + np.cos(np.pi * i / 13)) / 2 for i in range(1, 13)]
    assert rates == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("samples", "batch", "epochs"), [(30, 8, 3), (30, 30, 2), (31, 30, 4), (7, 1, 2), (9, 4, 1)]
)
def test_the_number_of_steps_is_that_of_the_batches(samples, batch, epochs):
    batches = Batches(
        np.zeros((samples, 1, 2, 2), np.float32), np.zeros(samples, np.int32), batch, seed=0, wrap=True
    )
    count = 0
    while batches.epoch < epochs:
        batches.next_batch()
        count += 1
    assert steps_of(samples, batch, epochs) == count


def test_every_held_out_sample_is_counted_once():
    model = build("mlp", (1, 8, 8), 3)
    ws = gpunet.Workspace("cpu", seed=4)
    ws.run_once(model.init_net)
    images, labels = DATA.test_images, DATA.test_labels
    whole = Evaluator(model, ws, batch_size=100).probabilities(images)
    for size in (1, 3, 11):
        evaluator = Evaluator(model, ws, batch_size=size)
        assert evaluator.probabilities(images) == pytest.approx(whole, abs=1e-6)
        score = evaluator.score(images, labels)
        assert score.samples == 11
        assert score.accuracy == np.mean(whole.argmax(1) == labels)
        expected = -np.mean(
            [np.log(np.float64(row[label])) for row, label in zip(whole, labels, strict=True)]
        )
        assert score.loss == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ShapeError, match="0 images and 0 labels to evaluate"):
        evaluator.score(images[:0], labels[:0])


def test_held_out_samples_do_not_change_statistics():
    one = make_trainer(Settings.of("resnet20", 0, epochs=1, batch_size=8), DATA, device="cpu")
    before = one.workspace.fetch("conv1_bn_rm")
    Evaluator(one.model, one.workspace).score(DATA.test_images, DATA.test_labels)
    assert np.array_equal(one.workspace.fetch("conv1_bn_rm"), before)
    one.run()
    assert not np.array_equal(one.workspace.fetch("conv1_bn_rm"), before)


def test_divergence_ends_training_and_names_step_and_rate(tmp_path):
    settings = Settings.of("mlp", 0, epochs=20, batch_size=8, learning_rate=1e20)
    one = make_trainer(
        settings, DATA, device="cpu", checkpoints=CheckpointFolder(tmp_path), checkpoint_every=1
    )
    with pytest.raises(
        TrainingError, match=r"the loss is (nan|inf) at step (\d+) \(epoch \d+\) with learning rate [\d.]+e\+"
    ):
        one.run()
    # What was saved before is still there, and nothing after.
    assert CheckpointFolder(tmp_path).latest().state.step == len(one.history.steps)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)]
)
def test_a_signal_saves_a_checkpoint_between_two_steps(tmp_path, number, code):
    settings = Settings.of("mlp", 0, epochs=20, batch_size=8)
    one = make_trainer(settings, DATA, device="cpu", checkpoints=CheckpointFolder(tmp_path))
    before = signal.getsignal(number)
    with pytest.raises(
        TrainingInterruptedError, match=f"after step 6 of 75; a checkpoint is in {tmp_path}"
    ) as caught:
        one.run(reporter=Watch(6, lambda: signal.raise_signal(number)))
    assert caught.value.exit_code == code
    assert signal.getsignal(number) is before
    assert CheckpointFolder(tmp_path).latest().state.step == 6


@pytest.mark.parametrize("setting", ["batch-size", "seed", "verify-every", "data", "learning-rate"])
def test_ranks_with_other_settings_are_named(setting, monkeypatch):
    """Nets do not tell how many samples a batch has: ranks would weigh them wrongly, and say nothing."""

    def gather(ranks, mine):
        other = {**mine, setting: "another"} if isinstance(mine, dict) and setting in mine else mine
        return [mine, other]

    monkeypatch.setattr(SingleCommunicator, "all_gather_object", gather)
    settings = Settings.of("mlp", 0, epochs=1, batch_size=8)
    with pytest.raises(
        CollectiveError, match=f"setting '{setting}' is not the same on all ranks: rank 0 has"
    ):
        make_trainer(settings, DATA, device="cpu", ranks=Ranks())


def test_a_second_signal_ends_at_once():
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer().run(reporter=Watch(2, twice))


def test_a_signal_in_the_last_step_loses_nothing():
    history = trainer().run(reporter=Watch(12, lambda: signal.raise_signal(signal.SIGTERM)))
    assert len(history.epochs) == 3


def test_settings_that_make_no_sense():
    with pytest.raises(TrainingError, match="batch size 31, wanted at most the 30 training samples"):
        trainer(batch_size=31)
    with pytest.raises(TrainingError, match="0 epochs, wanted at least 1"):
        trainer(epochs=0)
    with pytest.raises(ArgumentError, match="momentum is 1"):
        trainer(momentum=1)
    with pytest.raises(TrainingError, match="precision 'float8', wanted one of float32, float16, bfloat16"):
        trainer(precision="float8")
    with pytest.raises(TrainingError, match="0 micro-batches, wanted at least 1"):
        make_trainer(Settings.of("mlp"), DATA, ranks=Ranks(micro_batches=0))
    with pytest.raises(TrainingError, match=r"topk:0.01:0.9 has momentum 0.9 and the optimizer 0.9"):
        make_trainer(Settings.of("mlp"), DATA, ranks=Ranks("topk"))
    with pytest.raises(DeviceError, match="unknown device 'gpu'"):
        make_trainer(Settings.of("mlp"), DATA, device="gpu")


def test_micro_batches_train_like_batches():
    settings = Settings.of("mlp", 0, epochs=2, batch_size=8)
    whole = make_trainer(settings, DATA, device="cpu").run()
    parts = make_trainer(settings, DATA, device="cpu", ranks=Ranks(micro_batches=3)).run()
    for a, b in zip(parts.steps, whole.steps, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=1e-5)
        assert a.learning_rate == b.learning_rate
    assert parts.epochs[-1].test_loss == pytest.approx(whole.epochs[-1].test_loss, abs=1e-5)


def test_micro_batches_in_float16_learn():
    settings = Settings.of("mlp", 0, epochs=3, batch_size=8, precision="float16")
    one = make_trainer(settings, DATA, device="cpu", ranks=Ranks(micro_batches=2))
    assert one.run().epochs[-1].test_accuracy == 1
    # Means over fewer samples have larger gradients, so the first scale of the loss may be too large.
    assert one.workspace.fetch("loss_scale_skipped_steps").item() <= 2


def test_a_run_depends_on_its_seed_alone():
    losses = [
        [
            s.loss
            for s in make_trainer(Settings.of("mlp", seed, epochs=1, batch_size=8), DATA, device="cpu")
            .run()
            .steps
        ]
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_clipping_and_decay_reach_the_network():
    plain, clipped, decayed = (trainer(**o) for o in ({}, {"clip_norm": 1e-3}, {"weight_decay": 0.5}))
    for one in (plain, clipped, decayed):
        one.run(reporter=None)
    moved = [np.abs(o.workspace.fetch("fc1_w")).sum() for o in (plain, clipped, decayed)]
    start = np.abs(trainer().workspace.fetch("fc1_w")).sum()
    assert abs(moved[1] - start) < 0.01 * start
    assert moved[2] < moved[0]


def test_the_log_reads_back_as_the_same_numbers(tmp_path):
    path = tmp_path / "steps.csv"
    one = trainer()
    with StepLog(path) as log:
        one.run(log)
    lines = path.read_text().splitlines()
    assert lines[0] == "step,epoch,loss,accuracy,learning_rate"
    rows = [line.split(",") for line in lines[1:]]
    assert [int(r[0]) for r in rows] == list(range(1, 13))
    assert [np.float32(r[2]) for r in rows] == [np.float32(s.loss) for s in one.history.steps]
    with StepLog(path, one.history.steps[:3]):
        pass
    assert path.read_text().splitlines() == lines[:4]


def test_history_survives_json():
    history = trainer().run()
    assert History.from_json(history.to_json()) == history


def test_the_curve_is_a_picture(tmp_path):
    save_curve(tmp_path / "curve.png", trainer().run(), "small")
    data = (tmp_path / "curve.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert data.endswith(b"IEND\xaeB`\x82")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown(terminal):
    import io

    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    one = trainer()
    with ConsoleReporter(console, one.total_steps) as reporter:
        one.run(reporter=reporter)
    console.print(summary(one.history, 11))
    shown = text.getvalue()
    assert ("\x1b[" in shown) == terminal
    assert "epoch 3/3  loss 0." in shown
    assert "held out: loss" in shown
    assert "samples/s" in shown
    assert "11 of 11" in shown
    assert len(shown.splitlines()) >= 3 + 5


def test_lenet_learns_digits_in_bfloat16_as_in_float32(tmp_path):
    accuracies = {}
    for precision in ("float32", "bfloat16"):
        one = make_trainer(
            Settings.of("lenet", 0, epochs=2, precision=precision),
            load_dataset("digits"),
            device="cpu",
            checkpoints=CheckpointFolder(tmp_path / precision),
        )
        accuracies[precision] = one.run().epochs[-1].test_accuracy
    assert accuracies["float32"] > 0.9
    assert accuracies["bfloat16"] > accuracies["float32"] - 0.015
    convolutions = [op for op in one.model.net.proto.op if op.type == "Conv"]
    assert convolutions
    assert all(one.model.specs[op.output[0]].dtype == bfloat16() for op in convolutions)
    assert all(one.workspace.fetch(name).dtype == np.float32 for name in one.model.saved_blobs())
    assert mixed_precision.SCALE not in one.model.state


def test_lenet_learns_digits_in_float16(tmp_path):
    one = make_trainer(
        Settings.of("lenet", 0, epochs=1, precision="float16"),
        load_dataset("digits"),
        device="cpu",
        checkpoints=CheckpointFolder(tmp_path),
    )
    history = one.run()
    (first, *_), (epoch,) = history.steps, history.epochs
    assert np.isfinite([step.loss for step in history.steps]).all()
    assert epoch.loss < first.loss / 2
    assert epoch.test_accuracy > 0.8
    halves = {op.output[0] for op in one.model.net.proto.op if op.type == "FloatToHalf"}
    convolutions = [op for op in one.model.net.proto.op if op.type == "Conv"]
    assert convolutions
    assert all(op.input[1] in halves for op in convolutions)
    assert all(one.workspace.fetch(name).dtype == np.float32 for name in one.model.saved_blobs())
    found = CheckpointFolder(tmp_path).latest()
    with pytest.raises(CheckpointError, match="precision is 'float16' there, 'float32' here"):
        make_trainer(Settings.of("lenet", 0, epochs=1), load_dataset("digits"), device="cpu").restore(found)


def test_a_first_step_that_overflows_in_float16_has_no_rate():
    one = trainer(precision="float16")
    one.workspace.feed(mixed_precision.SCALE, np.array(2.0**120, np.float32))
    steps = one.run().steps
    assert np.isnan(steps[0].learning_rate)
    assert one.workspace.fetch(mixed_precision.SKIPPED).item() >= 1
    assert one.workspace.fetch(mixed_precision.SCALE).item() < 2.0**120
    assert np.isfinite(steps[-1].loss)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_lenet_learns_digits(seed):
    one = make_trainer(Settings.of("lenet", seed), load_dataset("digits"), device="cpu")
    assert one.run().epochs[-1].test_accuracy >= 0.98
    assert one.epochs == 10
