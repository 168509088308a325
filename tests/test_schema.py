"""Schemas, arguments and definitions: what a declaration checks before anything runs."""

from __future__ import annotations

import numpy as np
import pytest

import gpunet
from gpunet import arguments, schema
from gpunet.arguments import parse_arguments
from gpunet.definitions import make_argument, make_operator
from gpunet.errors import ArgumentError, DeviceError, SchemaError
from gpunet.kernels import find
from gpunet.operator import Operator
from gpunet.proto import Argument, NetDef, OperatorDef, TensorProto
from gpunet.specs import OpaqueSpec, TensorSpec, format_shape, spec


def test_every_schema_is_documented():
    """Names, documentation and arguments are what users and the operator pages read."""
    for name in gpunet.operator_types():
        declared = schema.lookup(name)
        assert declared.doc, name
        assert all(arg.doc for arg in declared.args), name
        assert all(x.name for x in [*declared.inputs, *declared.outputs]), name


def test_every_operator_has_a_kernel_on_the_cpu():
    gpunet.kernels.load("cpu")
    lacking = [
        t for t in gpunet.operator_types() if not any(k[:2] == (t, "cpu") for k in gpunet.kernels._kernels)
    ]
    assert not lacking


def test_registering_twice_is_refused():
    with pytest.raises(SchemaError, match="'Relu' is already registered"):
        schema.register("Relu", infer=lambda op, inputs: inputs)
    gpunet.kernels.load("cpu")
    with pytest.raises(SchemaError, match="already has a kernel on 'cpu'"):
        gpunet.kernels.kernel("Relu")(lambda *a: None)


@pytest.mark.parametrize(("wrong", "right"), [("relu", "Relu"), ("Convv", "Conv"), ("SoftMax", "Softmax")])
def test_unknown_types_come_with_the_nearest_names(wrong, right):
    with pytest.raises(SchemaError, match=f"unknown operator type '{wrong}'.*did you mean .*{right}"):
        Operator(OperatorDef(type=wrong))


TABLE = {
    arg.name: arg
    for arg in [
        arguments.Int("i", 3, choices=(1, 2, 3)),
        arguments.Float("f", 0.5),
        arguments.Bool("b", True),
        arguments.Str("s", "x", choices=("x", "y")),
        arguments.Ints("is", (1,)),
        arguments.Floats("fs"),
        arguments.Strings("ss"),
        arguments.DataType("t", "float32"),
        arguments.Message("net", "n"),
    ]
}


def parsed(**values) -> arguments.Arguments:
    return parse_arguments(make_operator("T", **values), TABLE)


def test_defaults_and_given_values():
    args = parsed()
    assert (args.i, args.f, args.b, args.s, args.fs, args.t) == (3, 0.5, True, "x", (), np.dtype("float32"))
    assert not args.has("i")
    args = parsed(i=2, f=1.5, b=0, s="y", fs=[1.0, 2.0], ss=["a"], t=10, net=NetDef(name="n"), unknown=1)
    assert (args.i, args.f, args.b, args.s, args.fs, args.ss) == (2, 1.5, False, "y", (1.0, 2.0), (b"a",))
    assert args.t == np.int64
    assert args.net.name == "n"
    assert args.has("unknown")
    with pytest.raises(AttributeError, match="no argument 'unknown' is declared"):
        _ = args.unknown


def test_numbers_fit_where_nothing_is_lost():
    assert parsed(f=2).f == 2.0
    assert parsed(i=2.0).i == 2
    assert parsed(fs=[1, 2]).fs == (1.0, 2.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"i": "a"}, "argument 'i' holds s: \"b'a'\", wanted a whole number"),
        ({"i": 2.5}, "argument 'i' holds"),
        ({"i": 7}, "argument 'i' is 7, wanted one of 1, 2, 3"),
        ({"f": [1.0]}, "argument 'f' holds floats"),
        ({"s": "z"}, "argument 's' is 'z', wanted one of 'x', 'y'"),
        ({"s": b"\xff"}, "argument 's' holds"),
        ({"t": "quux"}, "argument 't' holds"),
        ({"net": 3}, "argument 'net' holds i"),
        ({"is": 3}, "argument 'is' holds"),
    ],
)
def test_wrong_arguments_say_what_was_found(values, message):
    with pytest.raises(ArgumentError) as caught:
        parsed(**values)
    assert message in str(caught.value)


def test_required_and_repeated_arguments():
    with pytest.raises(ArgumentError, match="argument 'k' is missing, wanted a whole number"):
        parse_arguments(OperatorDef(), {"k": arguments.Int("k", arguments.REQUIRED)})
    twice = OperatorDef(arg=[Argument(name="i", i=1), Argument(name="i", i=2)])
    with pytest.raises(ArgumentError, match="'i' is given twice"):
        parse_arguments(twice, TABLE)
    assert parse_arguments(OperatorDef(arg=[Argument(name="i", i=1)] * 2), TABLE).i == 1


def test_arguments_from_python_values():
    field = {"a": 1, "b": True, "c": 0.5, "d": "x", "e": b"y", "f": np.float32(2), "g": np.arange(3)}
    made = {name: make_argument(name, value) for name, value in field.items()}
    assert made["a"].i == 1
    assert made["b"].i == 1
    assert made["c"].f == 0.5
    assert made["d"].s == b"x"
    assert made["f"].f == 2
    assert list(made["g"].ints) == [0, 1, 2]
    assert make_argument("t", TensorProto(dims=[2])).t.dims == [2]
    assert make_argument("d", np.float16).i == TensorProto.FLOAT16
    assert not make_argument("empty", []).ints
    with pytest.raises(ArgumentError, match="'x' is a list of float, int"):
        make_argument("x", [1, 2.5])
    with pytest.raises(ArgumentError, match=r"'x' is .*object"):
        make_argument("x", object())


def test_specs_say_what_they_are():
    assert str(spec((8, 3), "float32")) == "float32 8x3"
    assert format_shape(()) == "scalar"
    assert str(TensorSpec((2,), np.dtype(object))) == "string 2"
    assert str(OpaqueSpec("mutex")) == "mutex"
    assert spec((2, 3), "int64").nbytes == 48
    assert spec((), "int64").size == 1
    assert TensorSpec((2,), np.dtype("int64"), (1, 2)) == spec((2,), "int64")


def test_kernels_are_found_by_engine_left_to_right():
    op = Operator(make_operator("Relu", ["x"], ["y"], engine="NOPE, ALSO_NOT"))
    assert find(op, "cpu").engine == ""
    with pytest.raises(DeviceError, match="kind 'tpu'"):
        find(op, "tpu")
