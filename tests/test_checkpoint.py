"""Checkpoints: what is written is read back, what is damaged is found, and the older one remains."""

import json
import logging
import struct
import zlib

import numpy as np
import pytest

import gpunet
from gpunet.data import Dataset
from gpunet.dtypes import bfloat16
from gpunet.errors import CheckpointError
from gpunet.training import CheckpointFolder, Settings, make_trainer, read_checkpoint
from gpunet.training.records import MAGIC, read_records, write_records


def small_dataset(seed=0, samples=30):
    rng = np.random.default_rng(seed)
    images = rng.random((samples, 1, 8, 8), dtype=np.float32)
    labels = (np.arange(samples) % 3).astype(np.int32)
    return Dataset(images, labels, images[:8], labels[:8], classes=3, name="small")


DATA = small_dataset()


def trainer(tmp_path, settings=None, data=DATA, **options):
    settings = settings or Settings.of("mlp", 3, epochs=4, batch_size=8)
    return make_trainer(settings, data, device="cpu", checkpoints=CheckpointFolder(tmp_path), **options)


class StopAfter:
    """Ends a run as a crash would, after some steps."""

    class Crash(Exception):  # noqa: N818
        pass

    def __init__(self, steps):
        self.steps = steps

    def step(self, step, total, samples):
        if step.step == self.steps:
            raise self.Crash

    def epoch(self, epoch, total):
        pass


def run_until(one, steps):
    with pytest.raises(StopAfter.Crash):
        one.run(reporter=StopAfter(steps))


def numbers(history):
    return [(s.step, s.epoch, s.loss, s.accuracy, s.learning_rate) for s in history.steps], [
        (e.epoch, e.loss, e.accuracy, e.test_loss, e.test_accuracy) for e in history.epochs
    ]


def blobs(one):
    return {name: one.workspace.fetch(name) for name in one.model.training_blobs()}


def same(a, b):
    return a.keys() == b.keys() and all(
        a[k].tobytes() == b[k].tobytes() and a[k].dtype == b[k].dtype for k in a
    )


# ---- the file format


VALUES = {
    "f": np.float32([[1.5, -0.0, np.nan], [np.inf, 1e-45, 3]]),
    "scalar": np.float64(0.1) * np.ones(()),
    "half": np.float16([1, 2.5]),
    "bfloat16": np.array([[1, 2.5], [-0.0, np.inf]]).astype(bfloat16()),
    "empty": np.empty((0, 3), np.int64),
    "i": np.int64([2**62, -1]),
    "b": np.array([True, False]),
    "u": np.uint8([0, 255]),
    "text": b"bytes",
    "texts": np.array([b"a", b""], dtype=object),
    "q": gpunet.QuantizedTensor(np.uint8([1, 2]), 0.5, 3),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.checkpoint"
    write_records(path, {"a": [1, 2.5, None]}, VALUES.items())
    return path


def test_what_is_written_is_read_back(file):
    metadata, found = read_records(file)
    assert metadata == {"a": [1, 2.5, None]}
    assert list(found) == list(VALUES)
    for name, value in VALUES.items():
        if isinstance(value, np.ndarray):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert found[name].tolist() == value.tolist() or found[name].tobytes() == value.tobytes()
    assert found["text"] == b"bytes"
    assert (found["q"].data.tolist(), found["q"].scale, found["q"].zero_point) == ([1, 2], 0.5, 3)


def test_large_tensors_are_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("gpunet.training.records.CHUNK_ELEMENTS", 10)
    value = np.arange(37, dtype=np.float32).reshape(37, 1)
    path = tmp_path / "x"
    write_records(path, {}, [("a", value), ("b", value[:10])])
    assert path.read_bytes().count(b"Tensor") == 5
    found = read_records(path)[1]
    assert np.array_equal(found["a"], value)
    assert np.array_equal(found["b"], value[:10])


def test_every_damaged_byte_is_found(file):
    good = file.read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 0x10
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"^checkpoint .*x\.checkpoint: "):
            read_records(file)


def test_every_truncation_is_found(file):
    good = file.read_bytes()
    for size in range(len(good)):
        file.write_bytes(good[:size])
        with pytest.raises(CheckpointError, match=r"^checkpoint .*x\.checkpoint: "):
            read_records(file)


def record(kind, payload):
    head = struct.pack("<cQ", kind, len(payload))
    return head + payload + struct.pack("<I", zlib.crc32(head + payload))


START = MAGIC + struct.pack("<I", 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with nothing"),
        (b"\x08\x01 a protobuf, perhaps", "no checkpoint of gpunet"),
        (MAGIC + b"\1", "ends after 9 bytes, inside the version"),
        (MAGIC + struct.pack("<I", 2), "version 2 of the format, wanted 1"),
        (START + record(b"Z", b""), "of kind b'Z'"),
        (START + record(b"B", b""), "out of order"),
        (START + record(b"M", b"{}") * 2, "out of order"),
        (START + record(b"M", b"[]"), "JSON list, wanted an object"),
        (START + record(b"M", b"{"), "not JSON"),
        (START + record(b"M", b"{}") + record(b"E", b"x" * 32), "SHA-256"),
        (START + record(b"M", b"{}") + record(b"B", b"\xff"), "not a BlobProto"),
        (START + struct.pack("<cQ", b"M", 2**63), "wanted at most"),
        (START + struct.pack("<cQ", b"M", 2**20), "is cut off"),
    ],
)
def test_foreign_and_malformed_files(tmp_path, content, message):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_records(path)


def test_bytes_after_the_end_are_found(file):
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="1 bytes follow the last record"):
        read_records(file)


def test_a_failed_write_leaves_the_old_file(file):
    before = file.read_bytes()

    def failing():
        yield "f", VALUES["f"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_records(file, {}, failing())
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


# ---- runs


@pytest.mark.parametrize(("model", "steps"), [("mlp", 4), ("mlp", 7), ("mlp", 8), ("resnet20", 5)])
def test_a_resumed_run_gives_the_same_bits(tmp_path, model, steps):
    settings = Settings.of(model, 5, epochs=3, batch_size=8, max_shift=1, clip_norm=1.0)
    whole = trainer(tmp_path / "whole", settings, checkpoint_every=100)
    whole.run()
    assert len(whole.history.steps) == 12
    stopped = trainer(tmp_path / "stopped", settings, checkpoint_every=1)
    run_until(stopped, steps + 1)  # after the step, before its checkpoint
    resumed = trainer(tmp_path / "stopped", settings, checkpoint_every=100)
    checkpoint = CheckpointFolder(tmp_path / "stopped").latest()
    assert checkpoint.state.step == steps
    resumed.restore(checkpoint)
    resumed.run()
    assert numbers(resumed.history) == numbers(whole.history)
    assert same(blobs(resumed), blobs(whole))


def test_random_operators_go_on_where_they_were(tmp_path):
    from gpunet.data import Batches
    from gpunet.optimizers import Adam
    from gpunet.training import Trainer

    def with_dropout(folder, every):
        model = gpunet.Model("net")
        x, label = model.input("data", (1, 1, 8, 8)), model.input("label", (1,), "int32")
        scores = model.fc(model.dropout(model.relu(model.fc(x, "a", 20)), "d"), "b", 3)
        softmax = model.softmax(scores, "softmax")
        model.add("SoftmaxWithLoss", [scores, label], ["_p", "loss"])
        model.accuracy(softmax, label)
        model.add_gradients("loss")
        Adam(learning_rate=0.01).apply(model)
        return Trainer(
            model,
            gpunet.Workspace("cpu", seed=9),
            Batches(DATA.train_images, DATA.train_labels, 8, seed=1, wrap=True),
            (DATA.test_images, DATA.test_labels),
            epochs=3,
            checkpoints=CheckpointFolder(folder),
            checkpoint_every=every,
        )

    whole = with_dropout(tmp_path / "a", 100)
    whole.run()
    run_until(with_dropout(tmp_path / "b", 1), 6)
    resumed = with_dropout(tmp_path / "b", 100)
    resumed.restore(CheckpointFolder(tmp_path / "b").latest())
    resumed.run()
    assert numbers(resumed.history) == numbers(whole.history)
    assert same(blobs(resumed), blobs(whole))


def test_the_last_two_are_kept_and_left_overs_removed(tmp_path):
    (tmp_path / ".step-00000001.checkpoint.0123456789ab.tmp").write_bytes(b"x")
    (tmp_path / "step-99999999.checkpoint").write_bytes(b"of a run that was given up")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    trainer(tmp_path, checkpoint_every=2).run()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "notes.txt",
        "step-00000014.checkpoint",
        "step-00000015.checkpoint",
    ]
    assert CheckpointFolder(tmp_path).latest().state.finished


def test_a_damaged_checkpoint_leaves_the_older_one_usable(tmp_path, caplog):
    run_until(trainer(tmp_path, checkpoint_every=2), 9)
    folder = CheckpointFolder(tmp_path)
    newest, older = folder.paths()
    newest.write_bytes(newest.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING, "gpunet"):
        found = folder.latest()
    assert found.path == older
    assert "is cut off" in caplog.text
    assert older.name in caplog.text
    older.write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be used: .*cut off.*starts with nothing"
    ):
        folder.latest()


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path):
    assert CheckpointFolder(tmp_path).latest() is None
    assert CheckpointFolder(tmp_path / "none").latest() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.2}, "learning-rate is 0.1 there, 0.2 here"),
        ({"batch_size": 4}, "batch-size is 8 there, 4 here"),
        ({"epochs": 5}, "epochs is 4 there, 5 here"),
        (
            {"momentum": 0.5, "weight_decay": 0.0},
            "momentum is 0.9 there, 0.5 here; weight-decay is 0.0005 there",
        ),
    ],
)
def test_another_setting_is_named(tmp_path, changes, message):
    run_until(trainer(tmp_path, checkpoint_every=1), 3)
    settings = Settings.of("mlp", 3, **{"epochs": 4, "batch_size": 8, **changes})
    other = trainer(tmp_path, settings)
    before = blobs(other)
    with pytest.raises(CheckpointError, match=message):
        other.restore(CheckpointFolder(tmp_path).latest())
    assert same(blobs(other), before)
    assert other.history.steps == []


def test_another_model_seed_or_data_is_named(tmp_path):
    run_until(trainer(tmp_path, checkpoint_every=1), 3)
    found = CheckpointFolder(tmp_path).latest()
    settings = {"epochs": 4, "batch_size": 8}
    with pytest.raises(CheckpointError, match="model is 'mlp' there, 'resnet20' here"):
        trainer(tmp_path, Settings.of("resnet20", 3, **settings)).restore(found)
    with pytest.raises(CheckpointError, match="seed is 3 there, 4 here"):
        trainer(tmp_path, Settings.of("mlp", 4, **settings)).restore(found)
    with pytest.raises(CheckpointError, match=r"data is 'small \(\w+\)' there, 'small \(\w+\)' here"):
        trainer(tmp_path, data=small_dataset(seed=1)).restore(found)


def test_another_network_under_equal_settings_is_found(tmp_path):
    run_until(trainer(tmp_path, checkpoint_every=1), 3)
    other = trainer(tmp_path)
    other.model.net.proto.op[0].arg.add(name="new", i=1)
    with pytest.raises(CheckpointError, match="is of another network 'mlp'"):
        other.restore(CheckpointFolder(tmp_path).latest())


def changed(path, change):
    """The checkpoint at ``path``, its metadata and blobs changed, with right checksums."""
    metadata, found = read_records(path)
    change(metadata, found)
    write_records(path, metadata, found.items())
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, b: m.pop("step"), "entry 'step' of the metadata is None, wanted a JSON int"),
        (lambda m, b: m["data"].update(epoch="x"), "entry 'data' of the metadata has 'epoch'"),
        (lambda m, b: m["history"]["steps"]["loss"].pop(), "history of the run is malformed"),
        (lambda m, b: m["data"].update(position=10**9), "saved epoch 0, position 1000000000"),
        (lambda m, b: b.pop("fc1_w"), "lacks blob 'fc1_w'"),
        (lambda m, b: b.update(more=np.float32([1])), "also has blob 'more'"),
        (
            lambda m, b: b.update(fc1_w=np.float32([1])),
            "blob 'fc1_w' is float32 1 there, float32 256x64 here",
        ),
        (lambda m, b: b.update(fc1_w=b"text"), "blob 'fc1_w' is bytes there"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, change, message):
    run_until(trainer(tmp_path, checkpoint_every=1), 3)
    path = changed(CheckpointFolder(tmp_path).paths()[0], change)
    other = trainer(tmp_path)
    before, position = blobs(other), other.workspace.steps()
    with pytest.raises(CheckpointError, match=message):
        other.restore(read_checkpoint(path))
    assert same(blobs(other), before)
    assert other.workspace.steps() == position


def test_metadata_are_plain_json(tmp_path):
    run_until(trainer(tmp_path, checkpoint_every=1), 3)
    data = CheckpointFolder(tmp_path).paths()[0].read_bytes()
    kind, length = struct.unpack_from("<cQ", data, 12)
    metadata = json.loads(data[21 : 21 + length])
    assert kind == b"M"
    assert metadata["config"]["learning-rate"] == 0.1
    assert metadata["step"] == 2


def test_an_opaque_blob_cannot_be_stored(tmp_path):
    one = trainer(tmp_path)
    one.model.state.append("iteration_mutex")
    with pytest.raises(CheckpointError, match="'iteration_mutex'"):
        one.save()
    assert list(tmp_path.iterdir()) == []
