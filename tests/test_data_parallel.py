"""The rewriting of nets for data parallelism, in one process; what several do together is in
test_data_parallel_ranks.py.
"""

from pathlib import Path

import numpy as np
import pytest

import gpunet
from gpunet import mixed_precision
from gpunet.data import Batches, DatasetError
from gpunet.distributed import CollectiveError, SingleCommunicator
from gpunet.distributed.buckets import WEIGHT, bucket_sizes
from gpunet.distributed.compression import NAMES, Bucket, PowerSgd, compressor
from gpunet.distributed.data_parallel import FINITE, parallelize, synchronize_batch_norm
from gpunet.errors import ArgumentError, GradientError, KernelError
from gpunet.optimizers import SGD
from gpunet.zoo import build

RNG = np.random.default_rng(5)
IMAGES = RNG.random((12, 1, 8, 8), dtype=np.float32)
LABELS = (np.arange(12) % 3).astype(np.int32)


def make(name="mlp", *, sync=False, optimizer=None, **options):
    """A model with its gradients reduced and updates, in a workspace."""
    model = build(name, (1, 8, 8), 3)
    if sync:
        synchronize_batch_norm(model)
    model.add_gradients("loss")
    ranks = parallelize(model, **options) if options else None
    (optimizer or SGD(0.05, momentum=0.9, weight_decay=1e-3, clip_norm=0.5)).apply(model)
    workspace = gpunet.Workspace("cpu", seed=2)
    workspace.run_once(model.init_net)
    if ranks is not None:
        ranks.start(workspace)
    return model, ranks, workspace


def losses(model, ranks, workspace, steps=6, parts=1, engine="async_scheduling"):
    net = workspace.create(model.net, engine=engine, workers=1)
    micro = workspace.create(ranks.micro_net) if parts > 1 else None
    found = []
    for _ in range(steps):
        for index, part in enumerate(np.array_split(np.arange(len(LABELS)), parts)):
            if ranks is not None:
                ranks.set_weight(workspace, len(part), len(LABELS))
            workspace.feed("data", IMAGES[part])
            workspace.feed("label", LABELS[part])
            workspace.run(net if index == parts - 1 else micro)
        if ranks is not None:
            ranks.after_step(workspace)
        found.append(float(workspace.fetch("loss")))
    return np.array(found)


METRICS = {"metrics": ("loss", "accuracy")}
REFERENCE = losses(*make())


def types(model):
    return [op.type for op in model.net.proto.op]


def test_buckets_hold_gradients_in_the_order_in_which_they_are_made():
    model, ranks, _ = make(bucket_bytes=20_000, first_bucket_bytes=4_000)
    operators = list(model.net.proto.op)
    made = {}
    for i, op in enumerate(operators):
        for name in op.output:
            made.setdefault(name, i)
    names = [name for bucket in ranks.buckets for name in bucket.blobs]
    assert sorted(names) == sorted(p.gradient for p in model.params)
    limits = [4_000] + [20_000] * (len(ranks.buckets) - 1)
    ends = [max(made[n] for n in bucket.blobs) for bucket in ranks.buckets]
    begins = [min(made[n] for n in bucket.blobs) for bucket in ranks.buckets]
    assert all(end <= begin for end, begin in zip(ends[:-1], begins[1:], strict=True))
    for bucket, limit in zip(ranks.buckets[:-1], limits, strict=False):
        sizes = {n: 4 * int(np.prod(s)) for n, s in zip(bucket.blobs, bucket.shapes, strict=True)}
        last = max(bucket.blobs, key=lambda n: (made[n], bucket.blobs.index(n)))
        assert bucket.nbytes >= limit > bucket.nbytes - sizes[last]
        # Those that leave the next one aligned come first, each kind in the order in which it is made.
        kinds = [(sizes[n] % 256 != 0, made[n]) for n in bucket.blobs]
        assert kinds == sorted(kinds)
        # It is sent as soon as its last gradient is there.
        pack = next(
            i for i, op in enumerate(operators) if op.type == "PackBucket" and bucket.name in op.output
        )
        assert pack == max(made[n] for n in bucket.blobs) + 1
        following = [op.type for op in operators[pack : pack + 3]]
        assert following == ["PackBucket", "Allreduce", "UnpackBucket"]


@pytest.mark.parametrize(
    ("width", "asked", "want"),
    [
        (60_000, (None, None), (25 << 20, 1 << 20)),
        (60_000, (50 << 20, 2 << 20), (50 << 20, 2 << 20)),
        # An eighth of all gradients, so that there is something to reduce during the backward pass.
        (1_000, (None, None), (500_500, 500_500)),
    ],
)
def test_sizes_of_buckets(width, asked, want):
    model = gpunet.Model("wide")
    model.add("SumElements", [model.fc(model.input("data", (2, 1_000)), "fc", width)], "loss")
    model.add_gradients("loss")
    assert bucket_sizes(model, *asked) == want


def test_reductions_are_before_decay_clipping_and_updates_and_on_a_lane_of_their_own():
    model, _, workspace = make(bucket_bytes=20_000, **METRICS)
    found = types(model)
    last = len(found) - 1 - found[::-1].index("UnpackBucket")
    for later in ("WeightedSum", "SumSqrElements", "AtomicIter", "MomentumSGDUpdate"):
        assert found.index(later) > last
    net = workspace.create(model.net, engine="async_scheduling", workers=1)
    workspace.feed("data", IMAGES)
    workspace.feed("label", LABELS)
    workspace.run(net)
    (segment,) = workspace.program(net).segments()
    lanes = {}
    for item in segment.compiled.schedule.items:
        lanes.setdefault(item.lane.number, set()).add(item.node.op.type)
    communicating = {"PackBucket", "Allreduce", "UnpackBucket"}
    assert lanes[1] == communicating
    assert not lanes[0] & communicating


def test_metrics_are_reduced_while_the_backward_pass_is_at_work():
    """Behind whatever reads them, and before the first bucket."""
    model, ranks, _ = make(bucket_bytes=20_000, **METRICS)
    operators = list(model.net.proto.op)
    packs = [op.output[0] for op in operators if op.type == "PackBucket"]
    assert packs == ["metric_bucket", *(bucket.name for bucket in ranks.buckets)]
    unpacked = next(i for i, op in enumerate(operators) if "loss" in op.output and op.type == "UnpackBucket")
    for name in METRICS["metrics"]:
        assert all(name not in op.input for op in operators[unpacked + 1 :])
    assert sum("Gradient" in op.type for op in operators[unpacked:]) > 2


@pytest.mark.parametrize("engine", ["simple", "async_scheduling"])
def test_without_compression_nothing_changes(engine):
    found = losses(*make(bucket_bytes=9_000, first_bucket_bytes=1, **METRICS), engine=engine)
    np.testing.assert_array_equal(found, REFERENCE)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("float16", 1e-4),
        ("float16+feedback", 1e-4),
        ("bfloat16", 1e-3),
        ("bfloat16+feedback", 1e-3),
        ("powersgd:8", 0.05),
        ("topk:1:0", 1e-6),
    ],
)
def test_compression_keeps_the_course_of_training(name, tolerance):
    model, ranks, workspace = make(compression=name, **METRICS)
    np.testing.assert_allclose(losses(model, ranks, workspace), REFERENCE, atol=tolerance)
    ranks.verify(workspace)
    traffic = ranks.traffic(workspace)
    assert traffic.gradient_bytes == 4 * sum(workspace.fetch(p.name).size for p in model.params)
    sent = {"topk:1:0": 0.5} | {f"{b}float16{more}": 2.0 for b in ("", "b") for more in ("", "+feedback")}
    if name in sent:
        assert traffic.ratio == sent[name]
    else:
        assert traffic.ratio > 2
    assert (traffic.error is None) == (name in ("float16", "bfloat16"))
    if name == "topk:1:0":
        assert traffic.error == 0
    elif traffic.error is not None:
        assert 0 < traffic.error < 1


def test_what_was_not_sent_is_sent_later():
    """With error feedback, the sum of what is sent over many steps comes close to that of the gradients."""
    bucket = np.full(64, 1.0003, np.float32)
    gradients = {}
    for name in ("float16", "float16+feedback", "bfloat16", "bfloat16+feedback", "topk:0.25:0"):
        model = gpunet.Model("sum")
        x = model.input("x", (64,))
        w = model.add_parameter("w", (64,), "ConstantFill", value=1.0)
        model.add("SumElements", [model.add("Mul", [x, w], "product")], "loss")
        model.add_gradients("loss")
        ranks = parallelize(model, compression=name)
        workspace = gpunet.Workspace("cpu")
        workspace.run_once(model.init_net)
        ranks.start(workspace)
        workspace.feed("x", bucket)
        net = workspace.create(model.net)
        total = np.zeros(64)
        for _ in range(40):
            workspace.run(net)
            total += workspace.fetch(model.params[0].gradient)
        gradients[name] = total / 40
    assert np.abs(gradients["float16"] - bucket).max() > 2e-4
    assert np.abs(gradients["float16+feedback"] - bucket).max() < 3e-5
    assert np.abs(gradients["bfloat16"] - bucket).max() > 2e-4
    assert np.abs(gradients["bfloat16+feedback"] - bucket).max() < 1e-4
    assert np.abs(gradients["topk:0.25:0"] - bucket).max() < 0.1


def test_an_overflow_skips_the_step_and_is_counted():
    model, ranks, workspace = make(compression="float16", **METRICS)
    net = workspace.create(model.net)
    before = [workspace.fetch(name) for name in model.training_blobs()]
    # Large enough for gradients above 65,504.
    workspace.feed("data", IMAGES * np.float32(1e7))
    workspace.feed("label", LABELS)
    workspace.run(net)
    ranks.after_step(workspace)
    assert ranks.skipped == 1
    assert workspace.fetch(FINITE).item() == 0
    for name, value in zip(model.training_blobs(), before, strict=True):
        np.testing.assert_array_equal(workspace.fetch(name), value, err_msg=name)


@pytest.mark.parametrize("name", ["none", "float16+feedback"])
def test_micro_batches_make_one_update(name):
    whole = losses(*make(compression=name, **METRICS))
    parts = losses(*make(compression=name, accumulate=True, **METRICS), parts=3)
    np.testing.assert_allclose(parts, whole, atol=1e-5)


def test_synchronised_batch_norm_is_batch_norm_where_there_is_one_rank():
    plain, synced = make("resnet20"), make("resnet20", sync=True, **METRICS)
    np.testing.assert_allclose(losses(*synced, steps=2), losses(*plain, steps=2), atol=1e-5)
    for name in plain[0].statistics:
        np.testing.assert_allclose(synced[2].fetch(name), plain[2].fetch(name), rtol=1e-3, atol=1e-5)
    assert synced[0].training_blobs() == plain[0].training_blobs()
    # The net for inference needs nothing of the other ranks.
    assert synced[0].predict_net("softmax") == plain[0].predict_net("softmax")


def test_loss_scaling_checks_what_was_reduced():
    model = build("mlp", (1, 8, 8), 3)
    mixed_precision.to_half(model)
    mixed_precision.add_scaled_gradients(model, "loss")
    parallelize(model, compression="float16", **METRICS)
    found = types(model)
    assert found.count("UnscaleGradients") == found.count("StopUnless") == 1
    assert max(i for i, t in enumerate(found) if t == "UnpackBucket") < found.index("UnscaleGradients")


def test_a_rank_without_samples_adds_nothing():
    model, ranks, workspace = make(bucket_bytes=20_000, **METRICS)
    net = workspace.create(model.net)
    ranks.set_weight(workspace, 0, 12)
    workspace.feed("data", IMAGES[:0])
    workspace.feed("label", LABELS[:0])
    workspace.run(net)
    assert workspace.fetch("loss") == 0
    assert all(np.isfinite(workspace.fetch(p.name)).all() for p in model.params)
    with pytest.raises(ArgumentError, match="3 of 0 samples"):
        ranks.set_weight(workspace, 3, 0)


def test_sparse_gradients_are_gathered():
    model = gpunet.Model("rows")
    rows = model.input("rows", (3,), "int64")
    table = model.add_parameter("table", (5, 2), "ConstantFill", value=1.0)
    model.add("SumElements", [model.add("Gather", [table, rows], "picked")], "loss")
    model.add_gradients("loss")
    parallelize(model)
    SGD(0.5).apply(model)
    workspace = gpunet.Workspace("cpu")
    workspace.run_once(model.init_net)
    workspace.feed("rows", np.array([4, 0, 4]))
    workspace.run_once(model.net)
    expected = np.ones((5, 2), np.float32)
    expected[0] -= 0.5
    expected[4] -= 1.0
    np.testing.assert_array_equal(workspace.fetch("table"), expected)


def test_mistakes_are_named():
    model = build("mlp", (1, 8, 8), 3)
    with pytest.raises(GradientError, match=r"model.add_gradients\(loss\) before"):
        parallelize(model)
    model.add_gradients("loss")
    with pytest.raises(ArgumentError, match="bucket_bytes is 0"):
        parallelize(model, bucket_bytes=0)
    with pytest.raises(ArgumentError, match="metric 'softmax'"):
        parallelize(model, metrics=["softmax"])
    SGD(0.1).apply(model)
    with pytest.raises(GradientError, match="has an optimizer already"):
        parallelize(model)


@pytest.mark.parametrize("name", ["half", "powersgd:x", "powersgd:0", "topk:2", "topk:0.1:1", "none:1", ""])
def test_unknown_compression_is_refused(name):
    with pytest.raises(ArgumentError, match="wanted"):
        compressor(name)


def test_compressors_by_name():
    for name in NAMES:
        plain = name.split("[")[0]
        assert compressor(plain).name.startswith(plain)
    assert compressor("powersgd:4").rank == 4
    assert (compressor("topk:0.1:0.5").ratio, compressor("topk:0.1:0.5").momentum) == (0.1, 0.5)


def test_power_sgd_sends_small_gradients_as_they_are():
    bucket = Bucket("b", ("w", "v", "s"), ((64, 32, 3, 3), (64,), (2, 2)), np.dtype(np.float32))
    assert PowerSgd(2).bytes_sent(bucket) == 4 * (2 * (64 + 288) + 64 + 4)


class Others(SingleCommunicator):
    """Two ranks, of which the other one says something else."""

    size = 2

    def __init__(self, change):
        super().__init__()
        self.change = change

    def all_gather_object(self, obj):
        return [obj, self.change(obj)]


def test_ranks_that_differ_are_found():
    model, ranks, workspace = make(bucket_bytes=20_000)
    ranks._communicator = Others(lambda digests: digests)
    ranks.verify(workspace)
    ranks._communicator = Others(lambda digests: [*digests[:1], "0", *digests[2:]])
    with pytest.raises(KernelError, match=f"blob '{model.params[1].name}' differs between rank 1"):
        ranks.verify(workspace)
    ranks._communicator = Others(lambda nets: "0" if isinstance(nets, str) else [*nets[:3], "0", *nets[4:]])
    with pytest.raises(CollectiveError, match="operator 3 of net 'mlp_init' is not the same on all ranks"):
        ranks.start(workspace)


# The sharded sampler


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_shards_are_the_batch_in_order(ranks):
    images = np.arange(23 * 4, dtype=np.float32).reshape(23, 1, 2, 2)
    labels = np.arange(23, dtype=np.int32)

    def batches(rank, size):
        return Batches(images, labels, 8, seed=1, wrap=True, shard=(rank, size))

    whole, shards = batches(0, 1), [batches(r, ranks) for r in range(ranks)]
    for _ in range(7):
        x, y = whole.next_batch()
        parts = [shard.next_batch() for shard in shards]
        np.testing.assert_array_equal(np.concatenate([p[0] for p in parts]), x)
        np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), y)
        sizes = [len(p[1]) for p in parts]
        assert max(sizes) - min(sizes) <= 1
        assert all(shard.last_size == 8 for shard in shards)
        assert all(shard.state() == whole.state() for shard in shards)
    # A position goes on with another number of ranks.
    other = [batches(r, 4) for r in range(4)]
    for shard in other:
        shard.restore(shards[0].state())
    np.testing.assert_array_equal(
        np.concatenate([shard.next_batch()[1] for shard in other]), whole.next_batch()[1]
    )


def test_a_shard_that_is_none_is_refused():
    with pytest.raises(DatasetError, match="shard is"):
        Batches(IMAGES, LABELS, 4, seed=0, shard=(2, 2))


def test_weight_is_equal_shares_at_first():
    model, _, workspace = make(bucket_bytes=1)
    assert list(model.net.proto.external_input).count(WEIGHT) == 1
    assert workspace.fetch(WEIGHT) == [1.0]


def test_the_examples_of_the_documentation_run(capsys):
    page = (Path(__file__).resolve().parent.parent / "docs" / "distributed.md").read_text(encoding="utf-8")
    blocks = page.split("\n## In your own program\n")[1].split("```python\n")[1:]
    names = {}
    for block in blocks:
        exec(compile(block.split("```")[0], "docs/distributed.md", "exec"), names)
    assert "loss " in capsys.readouterr().out
    assert len(blocks) == 3
    assert names["copies"].names("fc1_w") == ("gpu_0/fc1_w", "gpu_1/fc1_w")
