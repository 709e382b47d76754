"""JSON configurations of other programs, whose values are validated on access."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from vitcli.architectures.resnet import LARGEST_IMAGE
from vitcli.checkpoints.tensor_file import require_file
from vitcli.config import Size
from vitcli.errors import CheckpointError
from vitcli.fields import describe_type
from vitcli.typed_json import from_json, parse

MAX_BYTES = 1 << 26
T = TypeVar("T")
Triple = tuple[float, float, float]
_CHOICE: Any = str | int
_SIZE: Any = int | Size
_TRIPLE: Any = float | Triple
_TYPE_NAMES: dict[Any, str] = {
    str: "a string",
    _SIZE: "a size in pixels (or a height and a width)",
    _TRIPLE: "three numbers (or one for all)",
    list[int]: "a list of whole numbers",
    list[str]: "a list of strings",
    dict[str, Any]: "an object",
}
"""Type names in error messages, where those of `describe_type` are worded for the command line."""


class ForeignJson:
    """A JSON object with typed access. A missing or null key yields the default; a value of the
    wrong type, or out of range, raises a CheckpointError that names the file and the key."""

    def __init__(self, values: dict[str, Any], where: object = None, path: str = "") -> None:
        self.values, self.where, self.path = values, where, path

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def merged(self, values: Mapping[str, Any]) -> ForeignJson:
        """Return a copy of this object, updated with `values`."""
        return ForeignJson({**self.values, **values}, self.where, self.path)

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise a CheckpointError that the value of `key` is not `expected`."""
        actual = f"is {self.values[key]!r:.60}, not" if key in self else "is missing: it should be"
        raise CheckpointError(f"{self.path}{key} {actual} {expected}", where=self.where)

    def get(
        self,
        key: str,
        expected_type: type[T],
        default: T | None = None,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> T:
        """Return a value of `expected_type`, whose numbers are in [low, high]."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        expected = _TYPE_NAMES.get(expected_type) or describe_type(expected_type)
        if (low, high) != (-math.inf, math.inf):
            expected += f" from {low:,} to {high:,}"
        try:
            parsed: T = from_json(expected_type, value)
        except ValueError:
            self.refuse(key, expected)
        for number in parsed if isinstance(parsed, tuple) else (parsed,):
            if isinstance(number, int | float) and not low <= number <= high:
                self.refuse(key, expected)
        return parsed

    def integer(
        self, key: str, default: int | None = None, low: int = 1, high: int = 1 << 20
    ) -> int:
        """Return an integer in [low, high]."""
        return self.get(key, int, default, low, high)

    def choice(self, key: str, choices: Mapping[Any, T], default: Any = None) -> T:
        """Look up a string (or an integer) in `choices`."""
        value = self.get(key, _CHOICE, default)
        if value not in choices:
            self.refuse(key, f"one of {', '.join(map(str, choices))}")
        return choices[value]

    def size(self, key: str, default: Size | None = None) -> Size:
        """Return (height, width), from one integer or two."""
        value = self.get(key, _SIZE, default, 1, LARGEST_IMAGE)
        return (value, value) if isinstance(value, int) else value

    def triple(self, key: str, default: Triple, low: float = -1e6) -> Triple:
        """Return three numbers; a single one is repeated."""
        value = self.get(key, _TRIPLE, default, low, 1e6)
        return value if isinstance(value, tuple) else (value, value, value)

    def nested(self, key: str) -> ForeignJson:
        """Return a nested object, empty if the key is missing."""
        return ForeignJson(self.get(key, dict[str, Any], {}), self.where, f"{self.path}{key}.")


def read_json(path: Path) -> ForeignJson | None:
    """Read the JSON object in a file; None if the file does not exist.

    Raises:
        CheckpointError: it cannot be read, or is not a JSON object.
    """
    require_file(path)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        values = parse(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=path) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"not a JSON object but {type(values).__name__}", where=path)
    return ForeignJson(values, path)
