"""The schema: numbers, names, types and defaults of every field, and life beside another schema."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import gpunet.proto as proto
from gpunet.proto import gpunet_pb2

ROOT = Path(__file__).resolve().parent.parent
WIRE = Path(__file__).resolve().parent / "golden" / "wire"

# Message: fields as `number:label type name [default]`, label R repeated, P packed, ! required.
FIELDS = """
TensorProto: 1:R int64 dims; 2:DataType data_type [1]; 3:RP float float_data; 4:RP int32 int32_data; 5:bytes byte_data; 6:R bytes string_data; 7:string name; 8:DeviceOption device_detail; 9:RP double double_data; 10:RP int64 int64_data; 11:Segment segment; 13:bytes raw_data; 15:uint32 data_format [0]
Segment: 1:! int64 begin; 2:! int64 end
QTensorProto: 1:R int64 dims; 2:! int32 precision; 3:! double scale; 4:! double bias; 5:! bool is_signed; 6:RP int32 data; 7:string name; 8:DataType data_type [2]; 9:R double scales; 10:R double biases; 11:int32 axis; 12:bool is_multiparam [False]
TensorProtos: 1:R TensorProto protos
TensorShape: 1:R int64 dims; 2:DataType data_type [1]; 3:R int32 unknown_dims; 4:bool unknown_shape [False]; 5:string name
TensorShapes: 1:R TensorShape shapes
TensorBoundShape: 1:TensorShape shape; 2:R DimType dim_type; 3:string name; 4:bool shape_is_final
TensorBoundShapes: 1:R TensorBoundShape shapes; 2:int64 max_batch_size; 3:int64 max_feature_len
AOTConfig: 1:! int64 max_batch_size; 2:! int64 max_seq_size; 3:! bool in_batch_broadcast; 4:string onnxifi_blacklist_ops; 5:int32 onnxifi_min_ops
Argument: 1:string name; 2:float f; 3:int64 i; 4:bytes s; 5:R float floats; 6:R int64 ints; 7:R bytes strings; 8:NetDef n; 9:R NetDef nets; 10:TensorProto t; 11:R TensorProto tensors; 12:R QTensorProto qtensors
DeviceOption: 1:int32 device_type [0]; 2:int32 device_id; 3:uint32 random_seed; 4:string node_name; 5:int32 numa_node_id; 6:R string extra_info
OperatorDef: 1:R string input; 2:R string output; 3:string name; 4:string type; 5:R Argument arg; 6:DeviceOption device_option; 7:string engine; 8:R string control_input; 9:bool is_gradient_op [False]; 10:string debug_info; 11:string domain; 12:int64 op_version
MapFieldEntry: 1:! string key; 2:! string val
BackendOptions: 1:! string backend_name; 2:R MapFieldEntry option
PartitionInfo: 1:! string name; 2:R int32 device_id; 3:string extra_info; 4:R BackendOptions backend_options
NetDef: 1:string name; 2:R OperatorDef op; 3:string type; 4:int32 num_workers; 5:DeviceOption device_option; 6:R Argument arg; 7:R string external_input; 8:R string external_output; 9:R PartitionInfo partition_info
ExecutionStep: 1:string name; 2:R ExecutionStep substep; 3:R string network; 4:int64 num_iter; 5:string criteria_network; 6:bool concurrent_substeps; 7:string report_net; 8:int32 report_interval; 9:string should_stop_blob; 10:bool only_once; 11:int64 run_every_ms; 12:bool create_workspace; 13:int32 num_concurrent_instances
PlanDef: 1:string name; 2:R NetDef network; 3:R ExecutionStep execution_step
BlobProto: 1:string name; 2:string type; 3:TensorProto tensor; 4:bytes content; 5:QTensorProto qtensor; 6:int32 content_num_chunks; 7:int32 content_chunk_id
DBReaderProto: 1:string name; 2:string source; 3:string db_type; 4:string key
BlobSerializationOptions: 1:string blob_name_regex; 2:int64 chunk_size
SerializationOptions: 1:R BlobSerializationOptions options
ModelInfo: 1:string project; 2:string modelClass; 3:string version; 4:string predictorType [SINGLE_PREDICTOR]; 5:string modelId
BlobsMap: 1:! string key; 2:R string value
NetsMap: 1:! string key; 2:! NetDef value
PlansMap: 1:! string key; 2:! PlanDef value
StringMap: 1:! string key; 2:! string value
MetaNetDef: 1:R BlobsMap blobs; 2:R NetsMap nets; 3:ModelInfo modelInfo; 4:R PlansMap plans; 5:R StringMap applicationSpecificInfo; 6:R string blobsOrder; 7:R string preLoadBlobs; 8:TensorBoundShapes tensorBoundShapes; 9:R string requestOnlyEmbeddings; 10:AOTConfig aotConfig
PredictorConsts: 1:string META_NET_DEF [!!META_NET_DEF]; 2:string PREDICTOR_DBREADER [!!PREDICTOR_DBREADER]; 3:string PARAMETERS_BLOB_TYPE [PARAMETERS_BLOB_TYPE]; 4:string INPUTS_BLOB_TYPE [INPUTS_BLOB_TYPE]; 5:string OUTPUTS_BLOB_TYPE [OUTPUTS_BLOB_TYPE]; 6:string GLOBAL_INIT_NET_TYPE [GLOBAL_INIT_NET_TYPE]; 7:string PREDICT_INIT_NET_TYPE [PREDICT_INIT_NET_TYPE]; 8:string PREDICT_NET_TYPE [PREDICT_NET_TYPE]; 9:string SINGLE_PREDICTOR [SINGLE_PREDICTOR]; 10:string MULTI_PREDICTOR [MULTI_PREDICTOR]; 11:string TRAIN_INIT_PLAN_TYPE [TRAIN_INIT_PLAN_TYPE]; 12:string TRAIN_PLAN_TYPE [TRAIN_PLAN_TYPE]; 13:string SHAPE_INFO_BLOB [SHAPE_INFO_BLOB]; 14:string DEFERRED_BLOB_READER [__DEFERRED_BLOB_READER__]
TwoNumberStatsProto: 1:float mean; 2:float stddev; 3:int64 count
BlobProfile: 1:string name; 3:TwoNumberStatsProto bytes_used
ProfDAGProto: 1:! string name; 2:! float mean; 3:! float stddev; 4:TwoNumberStatsProto execution_time; 5:R BlobProfile output_profile; 7:R string extra_info
ProfDAGProtos: 1:R ProfDAGProto stats; 2:string net_name; 3:R OpProfile ops_stats
OpProfile: 1:string idx; 2:string net_name; 3:string type; 4:float exec_time_secs
NodeProto: 1:R NodeProto children; 2:R int32 word_ids; 3:int32 offset; 4:string name; 5:R float scores
TreeProto: 1:NodeProto root_node
HierarchyProto: 1:int32 size; 2:R PathProto paths
PathProto: 1:int32 word_id; 2:R PathNodeProto path_nodes
PathNodeProto: 1:int32 index; 2:int32 length; 3:int32 target
"""  # noqa: E501
WANTED = dict(line.split(": ", 1) for line in FIELDS.strip().splitlines())

ENUM_VALUES = """
DataType: UNDEFINED 0, FLOAT 1, INT32 2, BYTE 3, STRING 4, BOOL 5, UINT8 6, INT8 7, UINT16 8, INT16 9, INT64 10, FLOAT16 12, DOUBLE 13, ZERO_COLLISION_HASH 14, REBATCHING_BUFFER 15
SerializationFormat: FMT_PROTOBUF 0, FMT_BFLOAT16 1
DimType: UNKNOWN 0, CONSTANT 1, BATCH 2, BATCH_OF_FEATURE_MAX 3, BATCH_OF_FEATURE_MAX_DEFAULT 4, FEATURE_MAX 5, FEATURE_MAX_DEFAULT 6
DeviceTypeProto: PROTO_CPU 0, PROTO_CUDA 1, PROTO_MKLDNN 2, PROTO_OPENGL 3, PROTO_OPENCL 4, PROTO_IDEEP 5, PROTO_HIP 6, PROTO_FPGA 7, PROTO_MSNPU 8, PROTO_XLA 9, PROTO_MLC 10, PROTO_COMPILE_TIME_MAX_DEVICE_TYPES 11
"""  # noqa: E501
WANTED_ENUMS = dict(line.split(": ", 1) for line in ENUM_VALUES.strip().splitlines())


def schema():
    """Our file as a message that describes it."""
    found = descriptor_pb2.FileDescriptorProto()
    gpunet_pb2.DESCRIPTOR.CopyToProto(found)
    return found


def all_messages(messages):
    for message in messages:
        yield message
        yield from all_messages(message.nested_type)


def described(field, default):
    labels = {1: "", 2: "!", 3: "R"}
    label = labels[field.label] + ("P" if field.options.packed else "")
    kind = field.type_name.rsplit(".", 1)[-1] or field.Type.Name(field.type)[5:].lower()
    shown = f" [{default}]" if field.HasField("default_value") else ""
    return f"{field.number}:{label + ' ' if label else ''}{kind} {field.name}{shown}"


def test_every_field_has_caffe2s_number_type_name_and_default():
    found = {}
    pool = gpunet_pb2.DESCRIPTOR.message_types_by_name
    classes = {**pool, "Segment": pool["TensorProto"].nested_types_by_name["Segment"]}
    for message in all_messages(schema().message_type):
        by_name = classes[message.name].fields_by_name
        fields = sorted(message.field, key=lambda field: field.number)
        found[message.name] = "; ".join(described(f, by_name[f.name].default_value) for f in fields)
    assert found == WANTED


def test_every_enum_has_caffe2s_values():
    described_by = schema()
    enums = list(described_by.enum_type)
    for message in described_by.message_type:
        enums.extend(message.enum_type)
    found = {enum.name: ", ".join(f"{value.name} {value.number}" for value in enum.value) for enum in enums}
    found["DataType"] = found["DataType"].removesuffix(", BFLOAT16 1016")  # ours
    assert found == WANTED_ENUMS


def test_package_exports_every_message_and_enum():
    for name, descriptor in gpunet_pb2.DESCRIPTOR.message_types_by_name.items():
        assert getattr(proto, name).DESCRIPTOR is descriptor
        assert name in proto.__all__
    for name, number in proto.DeviceTypeProto.items():
        assert getattr(proto, name) == getattr(proto, name.removeprefix("PROTO_")) == number
    assert {name for name in vars(proto) if not name.startswith("_")} - {"gpunet_pb2"} == set(proto.__all__)


@pytest.mark.parametrize("path", sorted(WIRE.glob("*.pb")), ids=lambda path: path.name)
def test_caffe2s_bytes_survive(path):
    data = path.read_bytes()
    message_type = proto.OperatorDef if path.name.endswith(".op.pb") else proto.NetDef
    message = message_type.FromString(data)
    assert message.SerializeToString() == data
    message.DiscardUnknownFields()
    assert message.SerializeToString() == data


def test_packed_and_unpacked_lists_are_read():
    assert list(proto.Argument.FromString(b"\x32\x03\x01\x02\x03").ints) == [1, 2, 3]
    assert list(proto.Argument.FromString(b"\x30\x01\x30\x02\x30\x03").ints) == [1, 2, 3]
    assert proto.Argument(ints=[1, 2]).SerializeToString() == b"\x30\x01\x30\x02"


def test_retired_numbers_cannot_come_back():
    tensor = next(message for message in schema().message_type if message.name == "TensorProto")
    assert [(r.start, r.end) for r in tensor.reserved_range] == [(12, 13), (14, 15)]


def test_lives_beside_caffe2s_own_schema():
    theirs = descriptor_pb2.FileDescriptorProto()
    theirs.CopyFrom(schema())
    theirs.name = "caffe2/proto/caffe2.proto"
    theirs.package = "caffe2"
    text = theirs.SerializeToString().replace(b".gpunet.", b".caffe2.")
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(text)
    their_net = message_factory.GetMessageClass(pool.FindMessageTypeByName("caffe2.NetDef"))
    assert their_net is not proto.NetDef
    assert pool.FindMessageTypeByName("gpunet.NetDef") is proto.NetDef.DESCRIPTOR
    data = (WIRE / "lenet_sgd.net.pb").read_bytes()
    assert their_net.FromString(data).SerializeToString() == proto.NetDef.FromString(data).SerializeToString()


def test_schema_is_registered_under_our_own_name():
    assert gpunet_pb2.DESCRIPTOR.name == "gpunet/proto/gpunet.proto"
    assert gpunet_pb2.DESCRIPTOR.package == "gpunet"


def test_generated_code_runs_on_the_oldest_protobuf_that_we_allow():
    text = (ROOT / "proto" / "gpunet_pb2.py").read_text(encoding="utf-8")
    generated_for = re.search(r"Protobuf Python Version: (\d+\.\d+\.\d+)", text)
    allowed = re.search(r'"protobuf>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert generated_for is not None
    assert allowed is not None
    assert allowed[1] == generated_for[1]


@pytest.fixture
def generate():
    """The generator as a module; it is a script beside the schema, not part of the package's interface."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generator_refuses_another_version(generate, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    with pytest.raises(RuntimeError, match=r"found grpcio-tools 1\.0, wanted 1\.74\.0"):
        generate.generate()


def test_generator_reports_stale_files(generate, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    monkeypatch.setattr(generate, "generate", lambda: {"a_pb2.py": "new"})
    assert generate.main(["--check"]) == 1
    assert "proto/a_pb2.py is not current" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert (tmp_path / "a_pb2.py").read_text() == "new"
    assert generate.main(["--check"]) == 0


def test_import_gives_no_warning():
    code = "import gpunet.proto, sys; sys.stdout.write(str(gpunet.proto.CUDA))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1", "")
