"""Data sets by name and folder, IDX files, images."""

from __future__ import annotations

import gzip
import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import gpunet.data
from gpunet.data import (
    DatasetError,
    load_dataset,
    load_digits,
    load_idx,
    load_image,
)
from gpunet.data.make_digits import make_digits
from gpunet.errors import FormatError, GpunetError

DATA_FOLDER = Path(gpunet.data.__file__).parent
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def idx_bytes(array: np.ndarray, code: int = 0x08) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(IDX_TYPES[code]).tobytes()


def write_pair(folder: Path, prefix: str, count: int, *, size: int = 4, packed: bool = False) -> None:
    """A pair of IDX files: pixel values and labels count up, so that every image is another one."""
    pixels = (np.arange(count * size * size) % 256).astype(np.uint8).reshape(count, size, size)
    labels = (np.arange(count) % 5).astype(np.uint8)
    for name, array in ((f"{prefix}-images-idx3-ubyte", pixels), (f"{prefix}-labels-idx1-ubyte", labels)):
        data = idx_bytes(array)
        (folder / (name + ".gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)


# --- digits ---------------------------------------------------------------------------------------


def test_digits_split_is_complete_and_stratified():
    (train, train_labels), (test, test_labels) = load_digits("train"), load_digits("test")
    for images, labels in ((train, train_labels), (test, test_labels)):
        assert images.dtype == np.float32
        assert labels.dtype == np.int32
        assert images.shape == (len(labels), 1, 8, 8)
        assert images.flags.c_contiguous
        assert images.min() == 0.0
        assert images.max() == 1.0
    assert len(train) + len(test) == 1797
    assert 290 <= len(test) <= 310
    whole = np.bincount(np.concatenate([train_labels, test_labels]), minlength=10)
    np.testing.assert_array_equal(np.bincount(test_labels, minlength=10), whole // 6)


def test_digits_split_holds_out_every_sixth_image_of_a_class():
    with np.load(DATA_FOLDER / "digits.npz", allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    test, test_labels = load_digits("test")
    for digit in range(10):
        want = images[labels == digit][5::6].astype(np.float32) / 16
        np.testing.assert_array_equal(test[test_labels == digit][:, 0], want)
    train, _ = load_digits("train")
    together = np.concatenate([train, test]).reshape(1797, 64)
    assert len(np.unique(together, axis=0)) == len(np.unique(images.reshape(1797, 64), axis=0))


def test_digits_are_reproducible_and_not_shared():
    first, labels = load_digits("test")
    first[:] = -1
    labels[:] = -1
    again, labels_again = load_digits("test")
    assert again.min() == 0.0
    assert labels_again.min() == 0


def test_digits_refuse_an_unknown_split():
    with pytest.raises(DatasetError, match="'validation', wanted 'train' or 'test'"):
        load_digits("validation")


def test_digits_are_attributed():
    text = (DATA_FOLDER / "DIGITS.md").read_text(encoding="utf-8")
    for part in ("Alpaydin", "Kaynak", "CC BY 4.0", "UCI", "test part"):
        assert part in text


def test_make_digits_keeps_values_and_order(tmp_path):
    rows = np.arange(3 * 65).reshape(3, 65) % 10
    source, target = tmp_path / "digits.csv.gz", tmp_path / "digits.npz"
    with gzip.open(source, "wt") as stream:
        np.savetxt(stream, rows, fmt="%d", delimiter=",")
    make_digits(source, target)
    with np.load(target, allow_pickle=False) as archive:
        assert archive["images"].dtype == archive["labels"].dtype == np.uint8
        np.testing.assert_array_equal(archive["images"].reshape(3, 64), rows[:, :64])
        np.testing.assert_array_equal(archive["labels"], rows[:, 64])


@pytest.mark.parametrize(("value", "match"), [(17, "pixels"), (-1, "pixels"), (0.5, "pixels")])
def test_make_digits_refuses_other_values(tmp_path, value, match):
    rows = np.zeros((2, 65))
    rows[1, 3] = value
    np.savetxt(tmp_path / "rows.csv", rows, delimiter=",")
    with pytest.raises(ValueError, match=match):
        make_digits(tmp_path / "rows.csv", tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


# --- IDX ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", IDX_TYPES)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4), (0, 3), (1, 2, 1, 2, 1)])
def test_idx_round_trip(tmp_path, code, packed, shape):
    want = (np.arange(math.prod(shape)) * 3 + 1).reshape(shape)
    data = idx_bytes(want, code)
    # The name says the opposite of the content: only the first bytes count.
    path = tmp_path / ("data" if packed else "data.gz")
    path.write_bytes(gzip.compress(data) if packed else data)
    got = load_idx(path)
    assert got.dtype == np.dtype(IDX_TYPES[code]).newbyteorder("=")
    assert got.dtype.isnative
    assert got.flags.writeable
    np.testing.assert_array_equal(got, want)


GOOD = idx_bytes(np.arange(12).reshape(3, 4))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "starts with nothing"),
        (b"\0\0\x08", "starts with 00 00 08"),
        (b"PK\3\4" + GOOD, "starts with 50 4b"),
        (b"\0\0\x07\1" + GOOD[4:], "element type is 0x07"),
        (b"\0\0\x08\0" + GOOD[4:], "0 dimensions"),
        (b"\0\0\x08\xff" + GOOD[4:], "255 dimensions"),
        (GOOD[:9], "header ends after 9 bytes, wanted 12"),
        (GOOD[:-1], r"12 bytes, but 11 follow"),
        (GOOD[:12], r"12 bytes, but 0 follow"),
        (GOOD + b"\0", "12 bytes, but more follow"),
        (struct.pack(">BBBB3I", 0, 0, 0x0E, 3, *[0xFFFFFFFF] * 3), "at most 4294967296 are read"),
        (struct.pack(">BBBBI", 0, 0, 8, 1, 0xFFFFFFFF), "4294967295 bytes, but 0 follow"),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_malformed_idx_is_a_format_error(tmp_path, data, match, packed):
    path = tmp_path / "bad"
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(FormatError, match=match) as caught:
        load_idx(path)
    assert str(path) in str(caught.value)


def test_idx_size_limit_can_be_lowered(tmp_path):
    (tmp_path / "a").write_bytes(GOOD)
    assert load_idx(tmp_path / "a", max_bytes=12).shape == (3, 4)
    with pytest.raises(FormatError, match="at most 11 are read"):
        load_idx(tmp_path / "a", max_bytes=11)


def test_damaged_gzip_is_a_format_error(tmp_path):
    packed = gzip.compress(idx_bytes(np.arange(3000).reshape(30, 100) * 7 % 251))
    path = tmp_path / "bad.gz"
    for cut in (3, 12, len(packed) // 2, len(packed) - 1):
        path.write_bytes(packed[:cut])
        with pytest.raises(FormatError, match="damaged or truncated gzip"):
            load_idx(path)
    # The checksum at the end is read and compared too.
    path.write_bytes(packed[:-8] + bytes(4) + packed[-4:])
    with pytest.raises(FormatError, match="damaged or truncated gzip"):
        load_idx(path)


def test_missing_idx_names_the_file(tmp_path):
    with pytest.raises(DatasetError, match=r"nowhere: cannot be read: No such file"):
        load_idx(tmp_path / "nowhere")


# --- load_dataset ---------------------------------------------------------------------------------


def test_digits_by_name():
    data = load_dataset("digits")
    assert (data.name, data.classes) == ("digits", 10)
    np.testing.assert_array_equal(data.train_images, load_digits("train")[0])
    np.testing.assert_array_equal(data.test_labels, load_digits("test")[1])


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_folder_with_both_pairs(tmp_path, packed):
    write_pair(tmp_path, "train", 12, packed=packed)
    write_pair(tmp_path, "t10k", 7, packed=packed)
    data = load_dataset(tmp_path)
    assert data.train_images.shape == (12, 1, 4, 4)
    assert data.test_images.shape == (7, 1, 4, 4)
    assert data.train_images.dtype == np.float32
    assert data.train_labels.dtype == np.int32
    assert data.classes == 5
    assert data.name == tmp_path.name
    want = (np.arange(12 * 16) % 256).astype(np.float32).reshape(12, 1, 4, 4) / np.float32(255)
    np.testing.assert_array_equal(data.train_images, want)
    np.testing.assert_array_equal(data.train_labels, np.arange(12) % 5)


@pytest.mark.parametrize("prefix", ["train", "t10k"])
@pytest.mark.parametrize(("count", "held_out"), [(10, 1), (19, 1), (40, 4)])
def test_the_last_tenth_of_a_single_pair_is_held_out(tmp_path, prefix, count, held_out):
    write_pair(tmp_path, prefix, count)
    data = load_dataset(str(tmp_path))
    assert (len(data.train_images), len(data.test_images)) == (count - held_out, held_out)
    labels = np.concatenate([data.train_labels, data.test_labels])
    np.testing.assert_array_equal(labels, np.arange(count) % 5)


def test_dots_in_file_names(tmp_path):
    write_pair(tmp_path, "t10k", 10)
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    assert load_dataset(tmp_path).train_images.shape == (9, 1, 4, 4)


def test_unknown_name_is_refused(tmp_path):
    with pytest.raises(DatasetError, match=r"no data set 'digitz': wanted 'digits' or a folder"):
        load_dataset("digitz")
    (tmp_path / "file").touch()
    with pytest.raises(DatasetError, match="wanted 'digits' or a folder"):
        load_dataset(tmp_path / "file")


def test_empty_folder_names_what_was_looked_for(tmp_path):
    with pytest.raises(DatasetError) as caught:
        load_dataset(tmp_path)
    for part in (
        str(tmp_path),
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
        ".gz",
    ):
        assert part in str(caught.value)


def test_half_a_pair_names_the_missing_half(tmp_path):
    write_pair(tmp_path, "train", 12)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DatasetError, match=r"has train-images-idx3-ubyte but no train labels: .*1-ubyte\.gz"):
        load_dataset(tmp_path)


def test_images_and_labels_must_fit(tmp_path):
    write_pair(tmp_path, "t10k", 12)
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(11)))
    with pytest.raises(FormatError, match="12 t10k images but 11 t10k labels"):
        load_dataset(tmp_path)
    labels.write_bytes(idx_bytes(np.zeros((12, 2))))
    with pytest.raises(FormatError, match=r"labels are uint8 of shape \(12, 2\), wanted uint8 of 1 dim"):
        load_dataset(tmp_path)
    labels.write_bytes(idx_bytes(np.zeros(12), 0x0C))
    with pytest.raises(FormatError, match="labels are int32"):
        load_dataset(tmp_path)
    write_pair(tmp_path, "t10k", 9)
    with pytest.raises(FormatError, match="has 9 images; at least 10"):
        load_dataset(tmp_path)
    write_pair(tmp_path, "train", 9, size=5)
    with pytest.raises(FormatError, match=r"\(1, 5, 5\), test images \(1, 4, 4\)"):
        load_dataset(tmp_path)


# --- images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (5, 2, 3, 4)])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(np.uint8, 255), (np.uint16, 65535), (np.float32, 1), (np.float64, 1), (np.int64, 1), (np.bool_, 1)],
)
def test_npy_images(tmp_path, shape, dtype, scale):
    array = (np.arange(math.prod(shape)) * 2).reshape(shape).astype(dtype)
    # The suffix does not matter.
    with (tmp_path / "image").open("wb") as stream:
        np.save(stream, array)
    got = load_image(tmp_path / "image")
    assert got.dtype == np.float32
    assert got.shape == (1,) * (4 - len(shape)) + shape
    np.testing.assert_array_equal(got.reshape(shape), array.astype(np.float32) / np.float32(scale))


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros(4), r"shape is \(4,\)"),
        (np.zeros((1,) * 5), r"shape is \(1, 1, 1, 1, 1\)"),
        (np.zeros((0, 4)), "not empty"),
        (np.array([["a"]]), "elements are <U1"),
        (np.zeros((2, 2), np.complex64), "elements are complex64"),
    ],
)
def test_unusable_npy_is_refused(tmp_path, array, match):
    np.save(tmp_path / "image.npy", array)
    with pytest.raises(FormatError, match=match):
        load_image(tmp_path / "image.npy")


def test_damaged_npy_is_refused(tmp_path):
    path = tmp_path / "image.npy"
    np.save(path, np.zeros((30, 30), np.float32))
    data = path.read_bytes()
    for bad, match in (
        (data[:7], "cannot be read as an array"),
        (data[:-5], "cannot be read as an array"),
        (b"not an array", "is not in NumPy's .npy format"),
    ):
        path.write_bytes(bad)
        with pytest.raises(FormatError, match=match):
            load_image(path)


def test_pickled_objects_are_never_loaded(tmp_path):
    np.save(tmp_path / "image.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(FormatError, match="cannot be read as an array"):
        load_image(tmp_path / "image.npy")


GRAY = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
COLOR = np.stack([GRAY, GRAY[::-1], 255 - GRAY], axis=-1)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff"])
def test_pictures(tmp_path, suffix):
    gray, color = tmp_path / f"gray.{suffix}", tmp_path / f"color.{suffix}"
    Image.fromarray(GRAY).save(gray)
    Image.fromarray(COLOR).save(color)
    got = load_image(gray)
    assert got.dtype == np.float32
    assert got.shape == (1, 1, 3, 4)
    np.testing.assert_array_equal(got[0, 0], GRAY.astype(np.float32) / np.float32(255))
    got = load_image(color)
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got[0], COLOR.transpose(2, 0, 1).astype(np.float32) / np.float32(255))


def test_pictures_are_converted_to_the_channels_wanted(tmp_path):
    Image.fromarray(GRAY).save(tmp_path / "gray.png")
    Image.fromarray(COLOR).save(tmp_path / "color.png")
    gray = load_image(tmp_path / "gray.png")
    np.testing.assert_array_equal(load_image(tmp_path / "gray.png", channels=3), np.repeat(gray, 3, axis=1))
    luma = (COLOR @ np.array([0.299, 0.587, 0.114]) / 255).astype(np.float32)
    np.testing.assert_allclose(load_image(tmp_path / "color.png", channels=1)[0, 0], luma, atol=1 / 255)
    with pytest.raises(DatasetError, match="channels is 2"):
        load_image(tmp_path / "gray.png", channels=2)


@pytest.mark.parametrize("mode", ["LA", "1", "P", "RGBA"])
def test_picture_modes(tmp_path, mode):
    two_values = np.where(GRAY > 100, 255, 0).astype(np.uint8)
    Image.fromarray(two_values).convert(mode).save(tmp_path / "image.png")
    want = two_values.astype(np.float32)[None, None] / np.float32(255)
    got = load_image(tmp_path / "image.png")
    assert got.shape[1] == (1 if mode in ("LA", "1") else 3)
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


def test_sixteen_bit_picture_is_scaled_not_clipped(tmp_path):
    Image.fromarray(GRAY.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    np.testing.assert_array_equal(
        load_image(tmp_path / "deep.png")[0, 0], GRAY.astype(np.float32) / np.float32(255)
    )


def test_pictures_are_scaled_to_height_and_width(tmp_path):
    Image.fromarray(np.full((6, 9), 51, np.uint8)).save(tmp_path / "image.png")
    got = load_image(tmp_path / "image.png", size=(2, 5))
    np.testing.assert_array_equal(got, np.full((1, 1, 2, 5), np.float32(51) / np.float32(255)))


def test_unreadable_pictures_are_refused(tmp_path):
    path = tmp_path / "image.png"
    with pytest.raises(DatasetError, match=r"image\.png: cannot be read: No such file"):
        load_image(path)
    path.write_bytes(b"what is this")
    with pytest.raises(FormatError, match="neither a picture"):
        load_image(path)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FormatError, match="damaged"):
        load_image(path)
    Image.fromarray(np.zeros((2, 2), np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(FormatError, match="floating point"):
        load_image(tmp_path / "float.tiff")


def test_without_pillow_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    path = tmp_path / "image.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(GpunetError, match=r"pip install 'gpunet\[data\]'"):
        load_image(path)
    np.save(tmp_path / "image.npy", GRAY)
    assert load_image(tmp_path / "image.npy").shape == (1, 1, 3, 4)
