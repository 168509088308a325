"""Models: parameters, inference while building, gradients, the net for inference."""

from __future__ import annotations

import numpy as np
import pytest

import gpunet
from gpunet.errors import BlobError, GradientError, NetError, ShapeError
from gpunet.proto import NetDef


def small(name: str = "m") -> gpunet.Model:
    model = gpunet.Model(name)
    x = model.input("data", (4, 1, 8, 8))
    label = model.input("label", (4,), "int32")
    x = model.relu(model.spatial_bn(model.conv(x, "conv", 3, 3, pad=1), "bn"))
    x = model.max_pool(x, "pool")
    x = model.dropout(model.fc(x, "fc", 10), "drop", 0.5)
    probabilities, _ = model.softmax_with_loss(x, label)
    model.accuracy(probabilities, label)
    return model


def fed(model: gpunet.Model, batch: int = 4) -> gpunet.Workspace:
    rng = np.random.default_rng(0)
    ws = gpunet.Workspace("cpu", seed=3)
    ws.run_once(model.init_net)
    ws.feed("data", rng.normal(size=(batch, 1, 8, 8)).astype(np.float32))
    ws.feed("label", rng.integers(0, 10, batch).astype(np.int32))
    return ws


def test_parameters_and_shapes_follow_from_the_input():
    model = small()
    assert [p.name for p in model.params] == ["conv_w", "conv_b", "bn_s", "bn_b", "fc_w", "fc_b"]
    assert [p.name for p in model.params if p.decay] == ["conv_w", "fc_w"]
    assert model.statistics == ["bn_rm", "bn_riv"]
    assert model.shape_of("conv") == (4, 3, 8, 8)
    assert model.shape_of("fc_w") == (10, 48)
    ws = fed(model)
    for name in model.saved_blobs():
        assert ws.fetch(name).shape == model.shape_of(name)


def test_training_lowers_the_loss_and_any_batch_size_runs():
    model = small()
    model.add_gradients("loss")
    assert all(p.gradient == f"{p.name}_grad" for p in model.params)
    gpunet.optimizers.SGD(0.1, momentum=0.9).apply(model)
    ws = fed(model, 6)
    ws.create(model.net)
    ws.run(model.net)
    first = ws.fetch("loss")
    ws.run(model.net, 40)
    assert ws.fetch("loss") < 0.5 * first


def test_layers_that_do_not_fit_fail_where_they_are_added():
    model = gpunet.Model()
    x = model.input("x", (2, 3, 8, 8))
    length = len(model.net.proto.op)
    with pytest.raises(ShapeError, match=r"\[MaxPool\] op 0 'p'.*"):
        model.max_pool(x, "p", 9)
    with pytest.raises(ShapeError, match="3 input and 4 output channels, wanted multiples of group 2"):
        model.conv(x, "c", 4, 1, group=2)
    with pytest.raises(ShapeError, match="one for each of 2 spatial dimensions"):
        model.conv(x, "c", 4, (1, 2, 3))
    assert len(model.net.proto.op) == length


def test_parameters_are_shared_by_name_and_scoped():
    model = gpunet.Model()
    x = model.input("x", (2, 6))
    with gpunet.name_scope("tower"):
        assert model.fc(x, "fc", 6) == "tower/fc"
        shared = model.add_parameter("fc_w", (6, 6))
    assert [p.name for p in model.params] == ["tower/fc_w", "tower/fc_b"]
    assert shared == "tower/fc_w"
    model.fc(x, "fc", 3)
    with pytest.raises(ShapeError, match="parameter 'fc_w' exists"):
        model.fc(x, "fc", 4)


def test_device_scopes_mark_operators():
    model = gpunet.Model()
    x = model.input("x", (2, 6))
    with gpunet.device_scope("cuda:1"):
        model.fc(x, "fc", 6)
    option = model.net.proto.op[-1].device_option
    assert (option.device_type, option.device_id) == (gpunet.proto.PROTO_CUDA, 1)


def test_gradients_come_once_and_last():
    model = small()
    model.add_gradients("loss")
    with pytest.raises(GradientError, match="gradients already"):
        model.add_gradients("loss")
    with pytest.raises(NetError, match="forward operators before them"):
        model.relu("fc", "late")


@pytest.mark.parametrize("layer", ["conv", "fc"])
def test_the_first_layer_makes_no_gradient_of_its_input_unless_asked(layer: str):
    results = []
    for wanted in (False, True):
        model = gpunet.Model()
        x = model.input("data", (4, 1, 8, 8))
        x = model.conv(x, "first", 3, 3) if layer == "conv" else model.fc(x, "first", 3)
        model.add("AveragedLoss", model.add("Sqr", x, "y"), "loss")
        gradients = model.add_gradients("loss", input_gradients=wanted)
        assert gradients.get("data") == ("data_grad" if wanted else None)
        ws = fed(model)
        ws.run_once(model.net)
        assert ws.has("data_grad") == wanted
        results.append([ws.fetch(name) for name in ("first_w_grad", "first_b_grad")])
    for without, beside in zip(*results, strict=True):
        np.testing.assert_array_equal(without, beside)


def test_gradients_of_inputs_that_others_read_or_add_up_stay():
    model = gpunet.Model()
    x = model.input("data", (4, 6))
    model.fc(model.relu(x, "positive"), "a", 6)
    model.add("AveragedLoss", model.add("Sub", ["a", model.fc(x, "b", 6)], "y"), "loss")
    assert model.add_gradients("loss")["data"] == "data_grad"
    ws = gpunet.Workspace("cpu", seed=3)
    ws.run_once(model.init_net)
    ws.feed("data", np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))
    ws.run_once(model.net)
    expected = (ws.fetch("data") > 0) * ws.fetch("a_w").sum(0) - ws.fetch("b_w").sum(0)
    np.testing.assert_allclose(ws.fetch("data_grad"), expected / 24, rtol=1e-5, atol=1e-7)


def test_a_loss_without_parameters_is_refused():
    model = gpunet.Model()
    x = model.input("x", (2, 6))
    model.fc(x, "fc", 6)
    y = model.add("Sqr", x, "y")
    model.add("AveragedLoss", y, "loss")
    with pytest.raises(GradientError, match="no parameter of model 'model'"):
        model.add_gradients("loss")


def test_the_net_for_inference():
    model = small()
    model.add_gradients("loss")
    net = model.predict_net("softmax")
    types = [op.type for op in net.op]
    assert types == ["Conv", "SpatialBN", "Relu", "MaxPool", "FC", "Dropout", "Softmax"]
    assert list(net.external_input) == ["data", *model.saved_blobs()]
    assert [len(op.output) for op in net.op if op.type in ("SpatialBN", "Dropout")] == [1, 1]
    ws = fed(model)
    before = ws.fetch("bn_rm")
    ws.create(net)
    ws.run(net.name)
    first = ws.fetch("softmax")
    ws.run(net.name)
    np.testing.assert_array_equal(first, ws.fetch("softmax"))
    np.testing.assert_array_equal(before, ws.fetch("bn_rm"))
    with pytest.raises(NetError, match="no operator that makes 'nope'"):
        model.predict_net("nope")


@pytest.mark.parametrize("axis", [None, 2])
def test_probabilities_of_a_loss_need_no_labels(axis):
    model = gpunet.Model()
    x, label = model.input("x", (2, 3, 5)), model.input("label", (2, 3) if axis else (2,), "int32")
    with gpunet.device_scope("cpu"):
        _, loss = model.softmax_with_loss(x, label, scale=0.5, **({"axis": axis} if axis else {}))
    (op,) = model.predict_net("softmax").op
    assert (op.type, op.input, op.output, op.HasField("device_option")) == (
        "Softmax",
        ["x"],
        ["softmax"],
        True,
    )
    assert [arg.name for arg in op.arg] == (["axis"] if axis else [])
    workspace = gpunet.Workspace("cpu")
    workspace.feed("x", np.random.default_rng(1).normal(size=(2, 3, 5)).astype(np.float32))
    workspace.feed("label", np.zeros((2, 3) if axis else 2, np.int32))
    workspace.run_once(model.net)
    wanted = workspace.fetch("softmax")
    workspace.run_once(model.predict_net("softmax"))
    np.testing.assert_array_equal(workspace.fetch("softmax"), wanted)
    for outputs in (loss, ["softmax", loss]):
        net = model.predict_net(outputs)
        assert [op.type for op in net.op] == ["SoftmaxWithLoss"]
        assert list(net.external_input) == ["x", "label"]


def test_layers_that_normalize_each_example():
    model = gpunet.Model()
    x = model.input("x", (2, 6, 4, 4))
    y = model.group_norm(x, "gn", 3)
    y = model.instance_norm(y, "in")
    y = model.layer_norm(y, "ln", axis=2)
    y = model.layer_norm(y, "plain", affine=False)
    assert [p.name for p in model.params] == ["gn_s", "gn_b", "in_s", "in_b", "ln_s", "ln_b"]
    assert (model.shape_of("gn_s"), model.shape_of("ln_b")) == ((6,), (4, 4))
    model.add("Sqr", y, "square")
    model.add("AveragedLoss", "square", "loss")
    model.add_gradients("loss")
    workspace = gpunet.Workspace("cpu", seed=3)
    workspace.run_once(model.init_net)
    workspace.feed("x", np.random.default_rng(4).normal(3, 2, (2, 6, 4, 4)).astype("float32"))
    workspace.run_once(model.net)
    np.testing.assert_allclose(workspace.fetch("loss"), 1, rtol=1e-3)
    assert workspace.fetch("ln_s_grad").shape == (4, 4)


def test_state_is_made_once():
    model = small()
    assert model.add_state("m", like="fc_w") == model.add_state("m", like="fc_w") == "m"
    assert model.shape_of("m") == (10, 48)
    assert model.training_blobs()[-1] == "m"
    assert fed(model).fetch("m").sum() == 0


def test_unknown_shapes_are_said():
    model = gpunet.Model()
    with pytest.raises(ShapeError, match="shape of blob 'q' is not known"):
        model.fc("q", "fc", 3)


def test_inference_over_a_whole_net():
    model = small()
    known = {
        n: (s.shape, s.dtype) for n, s in model.specs.items() if n in [*model.inputs, *model.saved_blobs()]
    }
    found = gpunet.infer(model.net, known)
    assert found["softmax"] == ((4, 10), np.dtype("float32"))
    assert found["loss"] == ((), np.dtype("float32"))
    known["data"] = ((9, 1, 8, 8), "float32")
    known["label"] = ((9,), "int32")
    assert gpunet.infer(model.net.proto.SerializeToString(), known)["pool"][0] == (9, 3, 4, 4)
    del known["fc_w"]
    with pytest.raises(BlobError, match=r"\[FC\].*input 'fc_w' is neither given nor made"):
        gpunet.infer(model.net, known)
    with pytest.raises(ShapeError, match="blob 'x' is given with shape"):
        gpunet.infer(NetDef(), {"x": ((-1,), "float32")})


def test_inference_leaves_out_what_depends_on_data():
    net = gpunet.Net("n")
    net.add("Reshape", ["x", "shape"], ["y", "old"])
    net.add("Relu", "y", "z")
    found = gpunet.infer(net, {"x": ((2, 3), "float32"), "shape": ((1,), "int64")})
    assert "y" not in found
    assert "z" not in found
    assert found["x"][0] == (2, 3)


def test_inference_follows_shapes_through_tensors():
    """The gradient of a Concat splits by a tensor whose elements follow from shapes."""
    net = gpunet.Net("n")
    net.add("Concat", ["a", "b"], ["y", "info"], axis=1)
    net.add("Split", ["y", "info"], ["c", "d"], axis=1)
    net.add("Shape", "a", "s")
    net.add("Reshape", ["c", "s"], ["e", "old"])
    found = gpunet.infer(net, {"a": ((2, 3), "float32"), "b": ((2, 5), "float32")})
    assert (found["c"][0], found["d"][0], found["e"][0]) == ((2, 3), (2, 5), (2, 3))


def test_nets_name_what_they_make():
    net = gpunet.Net("n")
    first = net.add("Relu", "x")
    second = net.add("Relu", first)
    pair = net.add("Split", second, 2, axis=0)
    assert (first, second) == ("n/Relu", "n/Relu_1")
    assert pair == ("n/Split", "n/Split_1")
    assert list(net.proto.external_input) == ["x"]
    assert net.makes(second)
    assert not net.makes("x")
