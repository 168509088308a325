"""The module `cudnn`, as far as gpunet calls it: plans that are names, executed by noting who did."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any


class cudnnGraphNotSupportedError(Exception):  # noqa: N801 (the library's name)
    pass


class Handle:
    def __init__(self) -> None:
        self.stream = 0
        self.destroyed = False


class Tensor:
    def __init__(self, **given: Any) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def change(value: Any) -> Tensor:
            self.given[name[4:]] = value
            return self

        return change


#: Which results the operations have.
RESULTS = {"batchnorm": 5, "batchnorm_backward": 3, "layernorm": 3, "layernorm_backward": 3}
#: Plans by name: bytes of workspace, and the note that forbids it.
PLANS: dict[str, tuple[int, str]] = {
    "eng0": (4096, "TENSOR_CORE"),
    "eng1": (512, ""),
    "eng2": (1024, ""),
    "eng3": (1 << 40, ""),
    "eng4": (0, "NONDETERMINISTIC"),
}


class Graph:
    def __init__(self, library: Library, **given: Any) -> None:
        self.library = library
        self.given = given
        self.tensors: list[Tensor] = []
        self.plan = ""
        self.notes: list[str] = []
        self.limit = 1 << 60

    def tensor(self, **given: Any) -> Tensor:
        self.tensors.append(Tensor(**given))
        return self.tensors[-1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "selected_engine":
            raise AttributeError(name)
        if name in ("validate", "build_operation_graph", "create_execution_plans", "check_support"):
            return lambda *modes: None

        def operation(**given: Any) -> Any:
            made = [Tensor(operation=name) for _ in range(RESULTS.get(name, 1))]
            return made if len(made) > 1 else made[0]

        return operation

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        self.notes = notes

    def deselect_workspace_greater_than(self, limit: int) -> None:
        self.limit = limit

    def get_execution_plan_count(self) -> int:
        return len(self.library.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return list(self.library.plans)[index]

    def build_plan_at_index(self, index: int) -> None:
        name = list(self.library.plans)[index]
        workspace, note = self.library.plans[name]
        if note in self.notes or workspace > self.limit:
            raise cudnnGraphNotSupportedError(f"{name} is deselected")
        self.library.built.append(name)
        self.plan = name

    def get_workspace_size(self) -> int:
        return self.library.plans[self.plan][0]

    def serialize(self) -> list[int]:
        return list(json.dumps(self.plan).encode())

    def deserialize(self, handle: Handle, data: list[int]) -> None:
        assert isinstance(handle, Handle)
        self.plan = json.loads(bytes(data))
        if self.plan not in self.library.plans:
            raise cudnnGraphNotSupportedError(f"{self.plan} is unknown")

    def execute(self, operands: dict[int, int], workspace: int, handle: Handle) -> None:
        assert not handle.destroyed
        assert all(type(value) is int for value in (*operands, *operands.values(), workspace))
        if self.plan in self.library.failing:
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED; Reason: it is broken")
        self.library.executed.append((self.plan, dict(operands), workspace, handle))


class Library:
    """In place of the module."""

    __version__ = "1.28.0"
    cudnnGraphNotSupportedError = cudnnGraphNotSupportedError  # noqa: N815

    def __init__(self) -> None:
        self.plans = dict(PLANS)
        self.failing: set[str] = set()
        self.built: list[str] = []
        self.executed: list[tuple[str, dict[int, int], int, Handle]] = []
        self.handles: list[Handle] = []
        self.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
        self.norm_forward_phase = SimpleNamespace(TRAINING="TRAINING")
        types = ("FLOAT", "HALF", "BFLOAT16", "DOUBLE", "INT8", "INT32")
        self.data_type = SimpleNamespace(**dict(zip(types, types, strict=True)))
        notes = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS", "NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION")
        self.numerical_note = SimpleNamespace(**dict(zip(notes, notes, strict=True)))

    def backend_version(self) -> int:
        return 92800

    def create_device_properties(self, device: int) -> Any:
        return SimpleNamespace(serialize=lambda: json.dumps({"deviceVer": 900, "cudaDeviceId": device}))

    def create_handle(self) -> Handle:
        self.handles.append(Handle())
        return self.handles[-1]

    def destroy_handle(self, handle: Handle) -> None:
        handle.destroyed = True

    def set_stream(self, handle: Handle, stream: int) -> None:
        handle.stream = stream

    def pygraph(self, **given: Any) -> Graph:
        return Graph(self, **given)


class Times:
    """Timing of the fake CUDA runtime: each pair of events took what is next in a list."""

    def __init__(self, taken: list[float]) -> None:
        self.taken = itertools.cycle(taken)
        self.alive = 0

    def add_to(self, runtime: Any) -> None:
        runtime.eventCreate = self.create
        runtime.eventElapsedTime = lambda start, stop: next(self.taken)
        self._runtime = runtime

    def create(self) -> int:
        return int(self._runtime.eventCreateWithFlags(0))
