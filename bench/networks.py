"""The networks whose compiled programs are measured: those of the zoo, and larger ones for 224x224 images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

import gpunet
from gpunet.proto import NetDef
from gpunet.specs import Shape

SGD_RATE, MOMENTUM = 0.01, 0.9
#: Sizes of the bottleneck blocks of ResNet-50 and of the plain ones of ResNet-18: blocks of each stage.
_BLOCKS: Final = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
#: Filters of the branches of each Inception block: 1x1, 3x3 behind 1x1, 5x5 behind 1x1, 1x1 behind the pool.
#: Source: Szegedy et al., Going deeper with convolutions, 2015, table 1.
_INCEPTION: Final = {
    "3a": (64, (96, 128), (16, 32), 32),
    "3b": (128, (128, 192), (32, 96), 64),
    "4a": (192, (96, 208), (16, 48), 64),
    "4b": (160, (112, 224), (24, 64), 64),
    "4c": (128, (128, 256), (24, 64), 64),
    "4d": (112, (144, 288), (32, 64), 64),
    "4e": (256, (160, 320), (32, 128), 128),
    "5a": (256, (160, 320), (32, 128), 128),
    "5b": (384, (192, 384), (48, 128), 128),
}
#: Behind these blocks the image is halved.
_HALVED: Final = ("3b", "4e")


@dataclass(frozen=True)
class Network:
    """A network: its name, what builds it without gradients, and the images it is measured with."""

    name: str
    build: Callable[[Shape, int], gpunet.Model]
    image: Shape
    classes: int = 10

    def model(self) -> gpunet.Model:
        """The network with loss and accuracy, without gradients."""
        return self.build(self.image, self.classes)

    def training(
        self,
        batch: int,
        *,
        recompute: int | None = None,
        engine: str | None = None,
        workers: int | None = None,
        keep: Sequence[str] = ("loss",),
    ) -> tuple[gpunet.Workspace, str]:
        """A workspace with the training net (SGD with momentum), created and fed; it has not run."""
        model = self.model()
        model.add_gradients("loss")
        gpunet.optimizers.SGD(SGD_RATE, momentum=MOMENTUM).apply(model)
        workspace = self._fed(model, batch)
        name = workspace.create(model.net, engine=engine, workers=workers, keep=keep, recompute=recompute)
        return workspace, name

    def inference(
        self, batch: int, *, engine: str | None = None, workers: int | None = None
    ) -> tuple[gpunet.Workspace, str]:
        """A workspace with the net that makes the probabilities, created and fed; it has not run."""
        model = self.model()
        workspace = self._fed(model, batch)
        net: NetDef = model.predict_net("softmax")
        net.name = f"{self.name}_inference"
        return workspace, workspace.create(net, engine=engine, workers=workers)

    def _fed(self, model: gpunet.Model, batch: int) -> gpunet.Workspace:
        workspace = gpunet.Workspace("cpu")
        workspace.run_once(model.init_net)
        rng = np.random.default_rng(0)
        workspace.feed("data", rng.standard_normal((batch, *self.image), dtype=np.float32))
        workspace.feed("label", rng.integers(0, self.classes, batch).astype(np.int32))
        return workspace


def _of_zoo(name: str) -> Callable[[Shape, int], gpunet.Model]:
    return lambda image, classes: gpunet.zoo.build(name, image, classes)


def _classifier(
    name: str, image: Shape, classes: int, features: Callable[[gpunet.Model, str], str]
) -> gpunet.Model:
    """What makes features of images, with the mean over the image, a layer of scores, and a loss."""
    model = gpunet.Model(name)
    data, label = model.input("data", (1, *image)), model.input("label", (1,), "int32")
    logits = model.fc(model.average_pool(features(model, data), "pool"), "logits", classes)
    softmax = model.softmax(logits, "softmax")
    model.add("SoftmaxWithLoss", [logits, label], ["_loss_softmax", "loss"])
    model.accuracy(softmax, label, "accuracy")
    return model


def _resnet(name: str) -> Callable[[Shape, int], gpunet.Model]:
    """A residual network (He et al., https://arxiv.org/abs/1512.03385, table 1)."""

    def features(model: gpunet.Model, data: str) -> str:
        x = model.relu(_conv_bn(model, data, "conv1", 64, 7, 2))
        x = model.max_pool(x, "pool1", 3, stride=2, pad=1)
        for stage, blocks in enumerate(_BLOCKS[name]):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = _residual(model, x, f"res{stage + 2}_{block}", 64 << stage, stride, name == "resnet50")
        return x

    return lambda image, classes: _classifier(name, image, classes, features)


def _conv_bn(model: gpunet.Model, x: str, name: str, filters: int, kernel: int, stride: int = 1) -> str:
    x = model.conv(
        x, name, filters, kernel, stride=stride, pad=kernel // 2, bias=False, weight_filler="MSRAFill"
    )
    return model.spatial_bn(x, f"{name}_bn")


def _residual(model: gpunet.Model, x: str, name: str, width: int, stride: int, bottleneck: bool) -> str:
    if bottleneck:
        y = model.relu(_conv_bn(model, x, f"{name}_a", width, 1))
        y = model.relu(_conv_bn(model, y, f"{name}_b", width, 3, stride))
        y = _conv_bn(model, y, f"{name}_c", 4 * width, 1)
    else:
        y = model.relu(_conv_bn(model, x, f"{name}_a", width, 3, stride))
        y = _conv_bn(model, y, f"{name}_b", width, 3)
    if model.shape_of(x) != model.shape_of(y):
        x = _conv_bn(model, x, f"{name}_shortcut", model.shape_of(y)[1], 1, stride)
    return model.relu(model.sum([y, x], name))


def _inception(image: Shape, classes: int) -> gpunet.Model:
    """GoogLeNet without its side classifiers and its local response normalisation."""

    def conv(model: gpunet.Model, x: str, name: str, filters: int, kernel: int, stride: int = 1) -> str:
        return model.relu(model.conv(x, name, filters, kernel, stride=stride, pad=kernel // 2))

    def block(model: gpunet.Model, x: str, name: str) -> str:
        one, three, five, pooled = _INCEPTION[name]
        branches = [
            conv(model, x, f"{name}_1x1", one, 1),
            conv(model, conv(model, x, f"{name}_3x3_in", three[0], 1), f"{name}_3x3", three[1], 3),
            conv(model, conv(model, x, f"{name}_5x5_in", five[0], 1), f"{name}_5x5", five[1], 5),
            conv(model, model.max_pool(x, f"{name}_pool", 3, stride=1, pad=1), f"{name}_pooled", pooled, 1),
        ]
        return model.concat(branches, name)

    def features(model: gpunet.Model, data: str) -> str:
        x = model.max_pool(conv(model, data, "conv1", 64, 7, 2), "pool1", 3, stride=2, pad=1)
        x = conv(model, conv(model, x, "conv2_in", 64, 1), "conv2", 192, 3)
        x = model.max_pool(x, "pool2", 3, stride=2, pad=1)
        for name in _INCEPTION:
            x = block(model, x, name)
            if name in _HALVED:
                x = model.max_pool(x, f"{name}_halved", 3, stride=2, pad=1)
        return x

    return _classifier("inception", image, classes, features)


#: All of them, by name.
NETWORKS: Final = {
    network.name: network
    for network in (
        Network("lenet", _of_zoo("lenet"), (1, 28, 28)),
        Network("mlp", _of_zoo("mlp"), (1, 28, 28)),
        Network("resnet20", _of_zoo("resnet20"), (3, 32, 32)),
        Network("resnet18", _resnet("resnet18"), (3, 224, 224), 1000),
        Network("resnet50", _resnet("resnet50"), (3, 224, 224), 1000),
        Network("inception", _inception, (3, 224, 224), 1000),
    )
}
