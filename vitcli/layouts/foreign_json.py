"""JSON configurations of other programs, whose values are checked where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from vitcli.config import Size
from vitcli.data.files import open_file
from vitcli.errors import CheckpointError
from vitcli.resnets import LARGEST_IMAGE
from vitcli.typed_json import parse

MOST_BYTES = 1 << 26
T = TypeVar("T")
Triple = tuple[float, float, float]


class ForeignJson:
    """A JSON object. A key that is absent or null has the default; a value of another type, or out
    of range, is a CheckpointError that names the file and the key."""

    def __init__(self, values: dict[str, Any], where: object = None, path: str = "") -> None:
        self.values, self.where, self.path = values, where, path

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def merged(self, *others: ForeignJson) -> ForeignJson:
        """This object, with the keys of the others in place of its own."""
        values = dict(self.values)
        for other in others:
            values |= other.values
        return ForeignJson(values, self.where, self.path)

    def refuse(self, key: str, wanted: str) -> NoReturn:
        """Raises CheckpointError."""
        value = f"is {self.values[key]!r:.60}, not" if key in self else "is missing: it should be"
        raise CheckpointError(f"{self.path}{key} {value} {wanted}", where=self.where)

    def whole(self, key: str, default: int | None = None, low: int = 1, high: int = 1 << 20) -> int:
        """A whole number in [low, high]."""
        value = self._value(key, default)
        if type(value) is not int or not low <= value <= high:
            self.refuse(key, f"a whole number from {low} to {high}")
        return value

    def number(
        self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e6
    ) -> float:
        """A number in [low, high]."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not low <= value <= high:
            self.refuse(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def word(self, key: str, choices: Mapping[Any, T], default: Any = None) -> T:
        """What a word (or a number) stands for."""
        value = self._value(key, default)
        if not isinstance(value, (str, int)) or value not in choices:
            self.refuse(key, f"one of {', '.join(map(str, choices))}")
        return choices[value]

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            self.refuse(key, "a string")
        return value

    def size(self, key: str, default: Size | None = None) -> Size:
        """Height and width: a whole number, or two."""
        value = self._value(key, default)
        sides = [value, value] if isinstance(value, int) else value
        if (
            not isinstance(sides, (list, tuple))
            or len(sides) != 2
            or any(type(side) is not int or not 1 <= side <= LARGEST_IMAGE for side in sides)
        ):
            self.refuse(key, "a size in pixels, or a height and a width")
        return sides[0], sides[1]

    def triple(self, key: str, default: Triple, low: float = -1e6) -> Triple:
        """Three numbers, or one for all."""
        value = self._value(key, default)
        values = [value] * 3 if type(value) in (int, float) else value
        if (
            not isinstance(values, (list, tuple))
            or len(values) != 3
            or any(type(x) not in (int, float) or not low <= x <= 1e6 for x in values)
        ):
            self.refuse(key, "three numbers")
        return float(values[0]), float(values[1]), float(values[2])

    def list_of(self, key: str, kind: type[T]) -> list[T]:
        """A list of such values; empty where there is none."""
        value = self._value(key, [])
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            self.refuse(key, f"a list of {kind.__name__}")
        return value

    def object(self, key: str) -> ForeignJson:
        """An object; an empty one where there is none."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            self.refuse(key, "an object")
        return ForeignJson(value, self.where, f"{self.path}{key}.")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def read_json(path: Path) -> ForeignJson | None:
    """The object in a file; None where there is no such file.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    try:
        with open_file(path) as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        values = parse(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=path) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"not a JSON object but {type(values).__name__}", where=path)
    return ForeignJson(values, path)
