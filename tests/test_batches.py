"""Batches whose order, position and augmentation are reproducible."""

from __future__ import annotations

import numpy as np
import pytest

from gpunet import philox
from gpunet.data import Batches, DatasetError, ShiftFlip

# --- batches --------------------------------------------------------------------------------------


def numbered(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels that hold their own position."""
    labels = np.arange(count, dtype=np.int32)
    return labels.astype(np.float32).reshape(count, 1, 1, 1), labels


@pytest.mark.parametrize(("count", "size"), [(10, 3), (12, 4), (5, 8), (1, 1), (7, 7)])
@pytest.mark.parametrize("shuffle", [False, True], ids=["ordered", "shuffled"])
def test_an_epoch_gives_every_sample_once(count, size, shuffle):
    batches = Batches(*numbered(count), size, seed=3, shuffle=shuffle)
    for epoch in range(3):
        assert batches.epoch == epoch
        expected = len(batches)
        seen = list(batches)
        assert len(seen) == expected == -(-count // size)
        assert all(len(labels) == size for _, labels in seen[:-1])
        for images, labels in seen:
            np.testing.assert_array_equal(images[:, 0, 0, 0], labels)
            assert images.dtype == np.float32
            assert labels.dtype == np.int32
        given = np.concatenate([labels for _, labels in seen])
        np.testing.assert_array_equal(np.sort(given), np.arange(count))
        if not shuffle:
            np.testing.assert_array_equal(given, np.arange(count))


def test_order_is_the_argsort_of_philox_keys():
    batches = Batches(*numbered(50), 8, seed=9)
    for epoch in (0, 4, 1):
        words = philox.raw(9, philox.operator_id("gpunet.data", "order"), epoch, 100).tolist()
        keys = [words[2 * i] + (words[2 * i + 1] << 32) for i in range(50)]
        assert batches.order(epoch).tolist() == sorted(range(50), key=keys.__getitem__)


def test_order_depends_on_seed_and_epoch():
    first, other = Batches(*numbered(30), 8, seed=1), Batches(*numbered(30), 5, seed=2)
    orders = {tuple(batches.order(epoch).tolist()) for batches in (first, other) for epoch in (0, 1)}
    assert len(orders) == 4


def test_drop_last_leaves_the_rest_out():
    batches = Batches(*numbered(11), 4, seed=3, drop_last=True)
    for epoch in range(2):
        assert len(batches) == 2
        order = batches.order(epoch)
        given = [labels for _, labels in batches]
        assert [len(labels) for labels in given] == [4, 4]
        np.testing.assert_array_equal(np.concatenate(given), order[:8])
    assert batches.epoch == 2


@pytest.mark.parametrize(("count", "size"), [(11, 4), (8, 4), (3, 8), (7, 6)])
def test_wrap_fills_batches_from_the_next_epoch(count, size):
    batches = Batches(*numbered(count), size, seed=3, wrap=True)
    given = [batches.next_batch() for _ in range(2 * count)]
    assert {len(labels) for _, labels in given} == {size}
    epochs = np.concatenate([labels for _, labels in given]).reshape(-1, count)
    for epoch, labels in enumerate(epochs):
        np.testing.assert_array_equal(labels, batches.order(epoch))
    np.testing.assert_array_equal(np.concatenate([i[:, 0, 0, 0] for i, _ in given]), epochs.reshape(-1))


def test_wrap_counts_the_batches_that_start_in_an_epoch():
    batches = Batches(*numbered(11), 4, seed=3, wrap=True)
    for expected in (3, 3, 3, 2, 3):
        assert len(batches) == expected
        assert len(list(batches)) == expected


@pytest.mark.parametrize("mode", [{}, {"drop_last": True}, {"wrap": True}], ids=["short", "drop", "wrap"])
@pytest.mark.parametrize("stop", range(8))
def test_a_restored_position_continues_exactly(mode, stop):
    def make() -> Batches:
        images = np.arange(11 * 2 * 4 * 4, dtype=np.float32).reshape(11, 2, 4, 4)
        augment = ShiftFlip(seed=5, max_shift=1)
        return Batches(images, np.arange(11, dtype=np.int32), 4, seed=5, augment=augment, **mode)

    undisturbed = make()
    want = [undisturbed.next_batch() for _ in range(16)]
    first = make()
    for _ in range(stop):
        first.next_batch()
    state = first.state()
    assert all(type(value) is int for value in state.values())
    second = make()
    second.restore(state)
    for images, labels in want[stop:]:
        got_images, got_labels = second.next_batch()
        np.testing.assert_array_equal(got_images, images)
        np.testing.assert_array_equal(got_labels, labels)


def test_state_inside_a_loop_is_behind_the_batch_in_hand():
    batches = Batches(*numbered(10), 5, seed=0, shuffle=False)
    states = [(batches.state()["epoch"], batches.state()["position"]) for _ in batches]
    assert states == [(0, 5), (1, 0)]


def test_restored_batches_finish_the_epoch_they_are_in():
    batches = Batches(*numbered(10), 3, seed=0, shuffle=False)
    batches.restore({**batches.state(), "epoch": 2, "position": 6})
    assert len(batches) == 2
    assert [labels.tolist() for _, labels in batches] == [[6, 7, 8], [9]]
    assert batches.epoch == 3


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 8}, "is for seed 8, this data has 0"),
        ({"samples": 11}, "is for samples 11, this data has 10"),
        ({"shuffle": 0}, "is for shuffle 0, this data has 1"),
        ({"position": 10}, "wanted epoch >= 0, 0 to 9"),
        ({"position": -1}, "wanted epoch >= 0, 0 to 9"),
        ({"epoch": -1}, "wanted epoch >= 0"),
    ],
)
def test_a_position_of_other_data_is_refused(change, match):
    batches = Batches(*numbered(10), 3, seed=0)
    batches.next_batch()
    before = batches.state()
    with pytest.raises(DatasetError, match=match):
        batches.restore({**before, **change})
    assert batches.state() == before


def test_an_incomplete_position_is_refused():
    with pytest.raises(DatasetError, match=r"lacks position, samples"):
        Batches(*numbered(10), 3, seed=0).restore({"epoch": 1, "seed": 0, "shuffle": 1})


@pytest.mark.parametrize(
    ("images", "labels", "size", "mode", "match"),
    [
        (3, 4, 1, {}, "3 images and 4 labels"),
        (0, 0, 1, {}, "0 images and 0 labels"),
        (4, 4, 0, {}, "batch_size is 0, wanted 1 or more"),
        (4, 4, 5, {"drop_last": True}, "batch_size is 5, wanted 1 to 4"),
        (4, 4, 2, {"drop_last": True, "wrap": True}, "exclude each other"),
    ],
)
def test_bad_batches_are_refused(images, labels, size, mode, match):
    with pytest.raises(DatasetError, match=match):
        Batches(numbered(images)[0], numbered(labels)[1], size, seed=0, **mode)


# --- augmentation ---------------------------------------------------------------------------------


def augmented(image: np.ndarray, index: int, epoch: int, seed: int, reach: int) -> np.ndarray:
    """The documented rule for one image, with loops."""
    w = philox.raw(seed, philox.operator_id("gpunet.data", "augment"), epoch, 4, offset=4 * index).tolist()
    down, right = ((w[i] * (2 * reach + 1) >> 32) - reach for i in (0, 1))
    height, width = image.shape[1:]
    result = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            if 0 <= y - down < height and 0 <= x - right < width:
                result[:, y, x] = image[:, y - down, x - right]
    return result[:, :, ::-1] if w[2] < 1 << 31 else result


def test_shift_flip_follows_its_rule_in_any_batch():
    images = np.random.default_rng(0).random((20, 3, 5, 6), dtype=np.float32) + 1
    augment = ShiftFlip(seed=11, max_shift=2)
    seen = set()
    for epoch, indices in ((0, [3, 0]), (0, [19, 4, 7]), (1, [3]), (0, list(range(20)))):
        before = images.copy()
        got = augment(images[indices], np.array(indices), epoch)
        np.testing.assert_array_equal(images, before)
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        for image, index in zip(got, indices, strict=True):
            np.testing.assert_array_equal(image, augmented(images[index], index, epoch, 11, 2))
            seen.add((epoch, index, image.tobytes()))
    # Two samples occur in two batches of epoch 0 each, and are the same there.
    assert len(seen) == 21


def test_shift_flip_can_be_switched_off():
    images = np.random.default_rng(0).random((6, 1, 4, 4), dtype=np.float32)
    indices = np.arange(6)
    np.testing.assert_array_equal(ShiftFlip(seed=1, max_shift=0, flip=False)(images, indices, 0), images)
    mirrored = ShiftFlip(seed=1, max_shift=0)(images, indices, 0)
    same = [np.array_equal(a, b) for a, b in zip(mirrored, images, strict=True)]
    assert 0 < sum(same) < 6
    assert ShiftFlip(seed=1)(images[:0], indices[:0], 0).shape == (0, 1, 4, 4)
    with pytest.raises(DatasetError, match="max_shift is -1"):
        ShiftFlip(seed=1, max_shift=-1)
