"""The model of scaling: its limits, and the points that others published."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

from gpunet.bench import scaling_model as model

LINK = model.Link(1e-5, 1e9)
WORK = model.Work(10_000_000, 0.01, 0.02)
CLUSTER = model.Cluster(4, model.Link(1e-6, 1e11), LINK)


def test_published_points_are_met_within_15_percent():
    points = model.published_points()
    assert [p.fitted for p in points] == [True, True, False, False]
    for point in points:
        assert point.error < (1e-6 if point.fitted else 0.15), point


def test_times_of_rings_and_trees():
    assert model.ring(1, 1e9, LINK) == model.tree(1, 1e9, LINK) == 0
    assert model.ring(2, 1e9, LINK) == pytest.approx(1, rel=1e-3)
    assert model.ring(1000, 1e9, LINK) == pytest.approx(2, rel=2e-2)
    # Small messages are for trees, large ones for rings.
    assert model.tree(64, 1e3, LINK) < model.ring(64, 1e3, LINK)
    assert model.ring(4, 1e9, LINK) < model.tree(4, 1e9, LINK)


def test_overlap_compression_and_one_gpu():
    assert model.efficiency(1, WORK, CLUSTER) == 1
    assert sum(model.buckets(WORK)) == 4 * WORK.gradients
    assert model.buckets(WORK)[0] == WORK.first_bucket_bytes
    plain = replace(WORK, overlap=False)
    together = model.efficiency(16, WORK, CLUSTER)
    assert model.efficiency(16, plain, CLUSTER) < together < 1
    assert together < model.efficiency(16, replace(WORK, compressed=True), CLUSTER)
    shares = [model.efficiency(n, WORK, CLUSTER) for n in (4, 8, 16, 64, 256)]
    assert shares == sorted(shares, reverse=True)


def test_commands():
    done = CliRunner().invoke(model.main, ["--check"], catch_exceptions=False)
    assert done.output.count("predicted") == done.output.count("fitted") == 2
    slow = CliRunner().invoke(model.main, ["--json"], catch_exceptions=False).output
    quick = CliRunner().invoke(model.main, ["--json", "--resnet50", "0.001"], catch_exceptions=False).output
    assert slow.count('"float16"') == quick.count('"float16"') == 6
    assert slow != quick
