"""Messages and files: round trips, Caffe2's text, and everything that can be wrong with them."""

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunet import proto
from gpunet.errors import FormatError
from gpunet.proto import BlobProto, NetDef, OperatorDef, QTensorProto, TensorProto
from gpunet.serialization import atomic_write, load, parse, parse_text, read_file, save

WIRE = Path(__file__).resolve().parent / "golden" / "wire"
LENET = (WIRE / "lenet_sgd.net.pb").read_bytes()

# --- messages


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_parse_round_trip(kind):
    assert parse(NetDef, kind(LENET), what="lenet").SerializeToString() == LENET


@pytest.mark.parametrize("size", [1, 100, len(LENET) - 1])
def test_truncated_message(size):
    with pytest.raises(
        FormatError, match=rf"^lenet\.pb: the {size} bytes are not a NetDef: damaged, cut off"
    ):
        parse(NetDef, LENET[:size], what="lenet.pb")


def test_oversized_message_is_refused_before_it_is_read():
    with pytest.raises(FormatError, match=r"^net: found 3305 bytes, wanted a NetDef of at most 3304 bytes$"):
        parse(NetDef, LENET, what="net", limit=len(LENET) - 1)
    assert parse(NetDef, LENET, what="net", limit=len(LENET)).name


def nested_step(depth):
    """A step in a step in a step, written by hand since no message can be built so deep."""
    data = b""
    for _ in range(depth):
        size, length = len(data), b""
        while size > 0x7F:
            length += bytes([size & 0x7F | 0x80])
            size >>= 7
        data = b"\x12" + length + bytes([size]) + data
    return data


def test_nesting_bomb():
    assert parse(proto.ExecutionStep, nested_step(50), what="plan").substep
    with pytest.raises(FormatError, match=r"plan: .*nested too deeply"):
        parse(proto.ExecutionStep, nested_step(20_000), what="plan")


def test_missing_required_field():
    data = QTensorProto(precision=8, scale=1.0).SerializePartialToString()
    with pytest.raises(FormatError, match=r"q: QTensorProto lacks required fields: bias, is_signed"):
        parse(QTensorProto, data, what="q")
    with pytest.raises(FormatError, match=r"lacks required fields: qtensors\[0\]\.scale"):
        parse_text(proto.Argument, "qtensors { precision: 1 bias: 0 is_signed: false }")


def test_names_that_are_not_utf8():
    with pytest.raises(FormatError, match=r"net: .*"):
        parse(NetDef, b"\x12\x04\x0a\x02\xff\xfe", what="net")
    assert parse(OperatorDef, b"\n\x06" + "größ".encode(), what="op").input == ["größ"]


@given(
    st.binary(max_size=300),
    st.sampled_from([NetDef, TensorProto, BlobProto, proto.MetaNetDef, proto.PlanDef]),
)
def test_any_bytes_parse_or_give_a_format_error(data, message_type):
    with contextlib.suppress(FormatError):
        assert isinstance(parse(message_type, data, what="fuzz"), message_type)


@given(st.data())
def test_a_damaged_net_parses_or_gives_a_format_error(data):
    damaged = bytearray(LENET)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        net = parse(NetDef, bytes(damaged), what="fuzz")
    except FormatError:
        return
    assert all(isinstance(name, str) for op in net.op for name in (*op.input, *op.output))


# --- text


def test_zoo_net_as_text():
    net = load(WIRE / "bvlc_alexnet.pbtxt", NetDef)
    assert net.name == "AlexNet"
    assert [op.type for op in net.op[-2:]] == ["FC", "Softmax"]
    assert len(net.op) == 23
    assert {arg.name: arg.i for arg in net.op[0].arg} == {"stride": 4, "pad": 0, "kernel": 11}


OLD_NET = """
name: "cuda_gpu_id: 7"  # cuda_gpu_id: 8 {
device_option { device_type: 1 cuda_gpu_id: 3 }
op {
  type: 'cuda_gpu_id: { 9'
  input: "a\\"cuda_gpu_id"
  device_option < device_type: 1
    cuda_gpu_id: 2 >
}
op: [{ type: "A" device_option: { cuda_gpu_id:1 } }, { type: "B" device_option { cuda_gpu_id :5 } }]
"""


def test_old_name_of_device_id():
    net = parse_text(NetDef, OLD_NET)
    assert net.device_option.device_id == 3
    assert [op.device_option.device_id for op in net.op] == [2, 1, 5]
    assert (net.name, net.op[0].type, net.op[0].input[0]) == (
        "cuda_gpu_id: 7",
        "cuda_gpu_id: { 9",
        'a"cuda_gpu_id',
    )
    assert parse_text(proto.DeviceOption, "cuda_gpu_id: 4").device_id == 4


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("cuda_gpu_id: 1", "line 1, column 1"),
        ("op {\n  cuda_gpu_id: 1\n}", "line 2, column 3"),
        ("partition_info { name: 'p' cuda_gpu_id: 1 }", "line 1, column 28"),
        ("device_option { cuda_gpu_id: 1 nope: 2 }", "line 1, column 32"),
        ("device_option { cuda_gpu_id: 1 device_id: 2 }", r"line 1, column \d+"),
        ("op {\n  type: 3\n}", "line 2, column 9"),
        ("name: 'a'\n}", "line 2, column 1"),
        ("name: '\\377'", r"line 1, column \d+"),
    ],
)
def test_wrong_text_names_line_and_column(text, place):
    with pytest.raises(FormatError, match=rf"^my\.pbtxt: {place}: "):
        parse_text(NetDef, text, what="my.pbtxt")


def test_unknown_name_in_text_is_named():
    wanted = r'line 1, column 1: .*"gpunet\.NetDef" has no field named "layer", wanted a NetDef as text$'
    with pytest.raises(FormatError, match=wanted):
        parse_text(NetDef, "layer { }")


def test_text_nesting_bomb():
    with pytest.raises(FormatError, match=r"ExecutionStep text: .*nested too deeply"):
        parse_text(proto.ExecutionStep, "substep {" * 20_000)


@given(st.text(alphabet="cuda_gpu_id: {}<>[],\"'\\#1\n", max_size=60))
def test_any_text_parses_or_gives_a_format_error(text):
    with contextlib.suppress(FormatError):
        assert parse_text(NetDef, "device_option { cuda_gpu_id: 1 } " + text).device_option.device_id == 1


# --- files


@pytest.mark.parametrize("name", ["net.pb", "net.pbtxt", "net.PROTOTXT", "net"])
def test_save_and_load(tmp_path, name):
    net = parse(NetDef, LENET, what="lenet")
    net.op[0].arg.add(name="größe", s=b"\x00\xff\"'\n", floats=[0.1, float("inf"), 1e-45, -0.0])
    save(tmp_path / name, net)
    assert load(tmp_path / name, NetDef) == net
    assert load((tmp_path / name).read_bytes(), NetDef) == net
    assert os.listdir(tmp_path) == [name]


def test_content_decides_where_the_name_does_not(tmp_path):
    (tmp_path / "text.pb").write_text('\n# a net\nname: "n"\n')
    (tmp_path / "binary.pbtxt").write_bytes(LENET)
    (tmp_path / "printable.pb").write_bytes(b"\n\x20" + b"a" * 32)
    (tmp_path / "mark.pbtxt").write_bytes(b"\xef\xbb\xbfname: 'n'")
    assert load(str(tmp_path / "text.pb"), NetDef).name == "n"
    assert load(tmp_path / "binary.pbtxt", NetDef).SerializeToString() == LENET
    assert load(tmp_path / "printable.pb", NetDef).name == "a" * 32
    assert load(tmp_path / "mark.pbtxt", NetDef).name == "n"


def test_wrong_text_in_a_file_of_any_name_names_the_line(tmp_path):
    for name in ("a.pb", "a.prototxt"):
        (tmp_path / name).write_text('name: "n"\nlayer { }\n')
        with pytest.raises(FormatError, match=rf"{name}: line 2, column 1: "):
            load(tmp_path / name, NetDef)


def test_unreadable_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cannot read the NetDef: No such file.*missing\.pb"):
        load(tmp_path / "missing.pb", NetDef)
    with pytest.raises(IsADirectoryError, match="cannot read the NetDef: "):
        load(tmp_path, NetDef)
    with pytest.raises(FormatError, match="cannot be a path"):
        load("a\0b", NetDef)
    (tmp_path / "empty.pb").touch()
    with pytest.raises(FormatError, match=r"empty\.pb: empty \(0 bytes\), wanted a NetDef"):
        load(tmp_path / "empty.pb", NetDef)
    with pytest.raises(FormatError, match="NetDef bytes: empty"):
        load(b"", NetDef)
    os.mkfifo(tmp_path / "pipe.pb")
    with pytest.raises(FormatError, match="found a pipe or device"):
        load(tmp_path / "pipe.pb", NetDef)


def test_huge_file_is_refused_unread(tmp_path):
    path = tmp_path / "huge.pb"
    with path.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(
        FormatError, match=r"huge\.pb: found 2147483648 bytes, wanted a NetDef of at most 2147483647"
    ):
        load(path, NetDef)
    with pytest.raises(FormatError, match="found 2147483648 bytes, wanted a file of at most 5 bytes"):
        read_file(path, limit=5)
    with pytest.raises(FormatError, match="NetDef bytes: found 9 bytes, wanted a NetDef of at most 8 bytes"):
        load(b"name: 'a'", NetDef, limit=8)


def test_save_refuses_what_load_would_refuse(tmp_path):
    with pytest.raises(FormatError, match="found a NetDef of 0 bytes"):
        save(tmp_path / "a.pb", NetDef())
    with pytest.raises(FormatError, match="lacks required fields: key, value"):
        save(tmp_path / "a.pb", proto.StringMap())
    assert os.listdir(tmp_path) == []


def test_atomic_write_keeps_links_and_permissions(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    atomic_write(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640
    atomic_write(tmp_path / ("n" * 255), b"a name of the greatest length")
    assert sorted(os.listdir(tmp_path)) == ["link", "n" * 255, "target"]


def test_atomic_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write: No space left on device: .*file"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_atomic_write_into_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="cannot write: "):
        atomic_write(tmp_path / "no" / "file", b"new")
