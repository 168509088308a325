"""One process, several devices: a copy of the network on each, under the names ``gpu_0/``, ``gpu_1/``, ...

The form of Caffe2's ``Parallelize_GPU``: parameters of all copies begin alike, gradients are summed by
NCCLAllreduce over the copies, and each copy is updated where it is, so they stay alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpunet.definitions import make_operator
from gpunet.devices import Device, parse_device
from gpunet.errors import ArgumentError, GradientError, NetError
from gpunet.model import Model
from gpunet.optimizers import Optimizer
from gpunet.proto import OperatorDef
from gpunet.scope import SEPARATOR, device_scope, name_scope


@dataclass(frozen=True)
class Replicas:
    """Copies of a network in one model; made by :func:`replicate`.

    Attributes:
        model: holds all copies.
        devices: where each of them is.
        scopes: the prefix of the names of each, with the separator.
        losses: what the builder returned for each, with its prefix.
    """

    model: Model
    devices: tuple[Device, ...]
    scopes: tuple[str, ...]
    losses: tuple[str, ...]

    def names(self, blob: str) -> tuple[str, ...]:
        """The blob of each copy, by its name without prefix."""
        return tuple(scope + blob for scope in self.scopes)

    def apply(self, optimizer: Optimizer) -> None:
        """Appends the updates of all copies, each on its device.

        Raises:
            ArgumentError: it clips by the norm of all gradients, which the copies have several times.
            GradientError: as :meth:`Optimizer.apply`.
        """
        if optimizer.clip_norm:
            raise ArgumentError(
                f"clip_norm is {optimizer.clip_norm:g}, wanted 0: the norm would be that of "
                f"{len(self.devices)} copies of the gradients"
            )
        before = len(self.model.net.proto.op), len(self.model.init_net.proto.op)
        optimizer.apply(self.model)
        for net, length in zip((self.model.net, self.model.init_net), before, strict=True):
            for op in net.proto.op[length:]:
                self._place(op)

    def _place(self, op: OperatorDef) -> None:
        """Puts an operator where the copy is whose blobs it writes; what belongs to none is left alone."""
        for scope, device in zip(self.scopes, self.devices, strict=True):
            if not op.HasField("device_option") and any(name.startswith(scope) for name in op.output):
                op.device_option.CopyFrom(device.option())


def replicate(
    model: Model,
    build: Callable[[Model], str],
    devices: Sequence[str | Device],
    *,
    prefix: str = "gpu",
) -> Replicas:
    """Builds a copy of a network for each device, with gradients that are the mean over all of them.

    Args:
        model: an empty model.
        build: appends the forward pass and returns its loss, the mean over the copy's samples. It is called
            once for each device, inside its name scope and its device scope; names of inputs that differ
            from copy to copy are made with :func:`gpunet.scope.scoped`.
        devices: one for each copy; a device may hold several.
        prefix: names of copy ``i`` begin with ``<prefix>_<i>/``.

    Raises:
        ArgumentError: there are no devices.
        NetError: the builder does not make the same parameters each time.
        GradientError: a parameter has a sparse gradient.
    """
    places = tuple(parse_device(device) for device in devices)
    if not places:
        raise ArgumentError("there are no devices, wanted at least one")
    scopes = tuple(f"{prefix}_{i}{SEPARATOR}" for i in range(len(places)))
    losses = []
    for scope, place in zip(scopes, places, strict=True):
        with name_scope(scope.removesuffix(SEPARATOR)), device_scope(place):
            losses.append(build(model))
    result = Replicas(model, places, scopes, tuple(losses))
    groups = _copies(result)
    if len(places) > 1:
        for names in groups:
            # Random fills differ by name: all copies begin with the values of the first.
            model.init_net.add("NCCLBroadcast", names, names)
    seeds: dict[str, str | None] = {}
    for loss, scope, place in zip(losses, scopes, places, strict=True):
        with device_scope(place):
            seeds[loss] = model.add_blob(f"{scope}loss_share", model.shape_of(loss), value=1.0 / len(places))
    model.add_gradients(seeds)
    if len(places) > 1:
        _sum_gradients(result)
    return result


def _copies(replicas: Replicas) -> list[list[str]]:
    """The copies of each parameter and each running statistic."""
    saved = replicas.model.saved_blobs()
    bare = [
        [name.removeprefix(scope) for name in saved if name.startswith(scope)] for scope in replicas.scopes
    ]
    for scope, names in zip(replicas.scopes, bare, strict=True):
        if names != bare[0]:
            wrong = sorted(set(names).symmetric_difference(bare[0]))
            raise NetError(
                f"copies {replicas.scopes[0]!r} and {scope!r} differ in parameter "
                f"{wrong[0] if wrong else names[0]!r}, wanted a builder that makes the same network each time"
            )
    return [list(replicas.names(name)) for name in bare[0]]


def _sum_gradients(replicas: Replicas) -> None:
    model = replicas.model
    made: dict[str, int] = {}
    for position, op in enumerate(model.net.proto.op):
        made.update(dict.fromkeys(op.output, position))
    gradients = {p.name: p.gradient for p in model.params}
    inserted: dict[int, list[OperatorDef]] = {}
    for name in [p.name.removeprefix(replicas.scopes[0]) for p in model.params]:
        found = [gradients.get(copy) for copy in replicas.names(name) if copy in gradients]
        if len(found) != len(replicas.scopes) or all(gradient is None for gradient in found):
            continue
        blobs = [gradient for gradient in found if isinstance(gradient, str)]
        if len(blobs) != len(found):
            raise GradientError(f"the gradient of {name!r} is sparse, wanted dense ones on several devices")
        position = max(made[blob] for blob in blobs)
        inserted.setdefault(position, []).append(make_operator("NCCLAllreduce", blobs, blobs))
    model.insert_operators(inserted)
