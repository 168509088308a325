"""Writes the checked-in Python modules of the schemas in this folder.

    python proto/generate.py            # writes *_pb2.py and *_pb2.pyi
    python proto/generate.py --check    # exits with 1 when a checked-in file is not current

Needs `grpcio-tools==1.74.0` (protoc 31.1), whose output runs on protobuf 6.31 and newer without a warning;
another version is refused, so that the output does not depend on the machine.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from importlib import metadata, resources
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
GRPCIO_TOOLS = "1.74.0"
# A schema's file name is global to a process: under our own prefix it meets no other project's.
PREFIX = "gpunet/proto"
# protoc leaves the type arguments of Mapping out.
STUB_HEADER = '# mypy: disable-error-code="type-arg"\n'


def generate() -> dict[str, str]:
    """Compiles every schema and returns the generated files as {file name: text}.

    Raises:
        RuntimeError: grpcio-tools is missing or has another version, or protoc refused a schema (its own
            words are on stderr).
    """
    try:
        found = metadata.version("grpcio-tools")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != GRPCIO_TOOLS:
        raise RuntimeError(f"proto/generate.py: found grpcio-tools {found}, wanted {GRPCIO_TOOLS}")
    protoc = importlib.import_module("grpc_tools.protoc")

    schemas = sorted(path.name for path in FOLDER.glob("*.proto"))
    with tempfile.TemporaryDirectory() as out:
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={PREFIX}={FOLDER}",
                f"--proto_path={resources.files('grpc_tools') / '_proto'}",
                f"--python_out={out}",
                f"--pyi_out={out}",
                *(f"{PREFIX}/{name}" for name in schemas),
            ]
        )
        if status != 0:
            raise RuntimeError(
                f"proto/generate.py: protoc ended with status {status} on {', '.join(schemas)}"
            )
        files = {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(out, PREFIX).iterdir())}
    return {name: STUB_HEADER + text if name.endswith(".pyi") else text for name, text in files.items()}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, 1 (not current) or 2 (could not generate)."""
    parser = argparse.ArgumentParser(description="Write the Python modules of the schemas in proto/.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 when a file is not current"
    )
    options = parser.parse_args(arguments)
    try:
        files = generate()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    stale = [
        name
        for name, text in files.items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != text
    ]
    if options.check:
        for name in stale:
            print(f"proto/{name} is not current: run python proto/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (FOLDER / name).write_text(files[name], encoding="utf-8")
        print(f"wrote proto/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
