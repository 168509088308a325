"""Sources of CUDA kernels by module name: the ``.cu`` files of this folder, and those that others register.

:func:`expand` puts the project's own headers into the text, as compilers want it: caches keyed by the text of
a source then see a change of a header. Lines keep their file and number through ``#line``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from gpunet.errors import DeviceError, SchemaError

FOLDER: Final = Path(__file__).resolve().parent
INCLUDE: Final = FOLDER / "include"

_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"[^\n]*$', re.MULTILINE)
_ONCE: Final = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b[^\n]*$", re.MULTILINE)
_registered: dict[str, str | Path] = {}


def register_source(module: str, source: str | Path) -> None:
    """Makes ``source`` (the text, or the path of a file) the module that kernels name in their declarations.

    Raises:
        SchemaError: the name is taken by another source.
    """
    if (FOLDER / f"{module}.cu").is_file() or _registered.get(module, source) != source:
        raise SchemaError(f"CUDA module {module!r} exists already, wanted another name")
    _registered[module] = source


def modules() -> list[str]:
    """The names of all modules of this package, sorted; without registered ones."""
    return sorted(path.stem for path in FOLDER.glob("*.cu"))


def read(module: str) -> tuple[str, str, Path]:
    """(text, name for messages, folder that its includes start from) of a module.

    Raises:
        DeviceError: there is no such module, or its file cannot be read.
    """
    source = _registered.get(module, FOLDER / f"{module}.cu")
    if isinstance(source, str):
        return source, f"{module}.cu", FOLDER
    return _read(source), _shown(source), source.resolve().parent


def expand(module: str) -> str:
    """The text of a module with the headers that it includes with quotes put in.

    Those of its own folder and of ``include/``, each once, at its first include. Other includes are left for
    the compiler.
    """
    text, name, folder = read(module)
    return _expand(text, name, folder, set())


def _expand(text: str, name: str, folder: Path, seen: set[Path]) -> str:
    parts = [f'#line 1 "{name}"\n']
    position = 0
    for match in _INCLUDE.finditer(text):
        path = next((p for p in (folder / match[1], INCLUDE / match[1]) if p.is_file()), None)
        if path is None:
            continue
        parts.append(text[position : match.start()])
        path = path.resolve()
        if path not in seen:
            seen.add(path)
            header = _ONCE.sub("", _read(path))
            line = text.count("\n", 0, match.end()) + 2
            parts.append(f'{_expand(header, _shown(path), path.parent, seen)}\n#line {line} "{name}"')
        position = match.end()
    parts.append(text[position:])
    return "".join(parts)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DeviceError(f"cannot read the CUDA source {path}: {error}") from None


def _shown(path: Path) -> str:
    path = path.resolve()
    return path.relative_to(FOLDER.parent).as_posix() if path.is_relative_to(FOLDER) else path.as_posix()
