"""JSON configurations of other programs, whose values are checked where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
        wanted = f"a whole number from {low} to {high}"
        return int(self._get(key, default, wanted, lambda v: type(v) is int and low <= v <= high))

    def number(
        self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e6
    ) -> float:
        """A number in [low, high]."""
        wanted = f"a number from {low:g} to {high:g}"
        return float(self._get(key, default, wanted, lambda v: _is_number(v) and low <= v <= high))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self._get(key, default, "true or false", lambda v: isinstance(v, bool)))

    def word(self, key: str, choices: Mapping[Any, T], default: Any = None) -> T:
        """What a word (or a number) stands for."""

        def is_choice(value: Any) -> bool:
            return isinstance(value, (str, int)) and value in choices

        return choices[self._get(key, default, f"one of {', '.join(map(str, choices))}", is_choice)]

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        return str(self._get(key, default, "a string", lambda v: isinstance(v, str)))

    def size(self, key: str, default: Size | None = None) -> Size:
        """Height and width: a whole number, or two."""

        def is_size(value: Any) -> bool:
            sides = value if isinstance(value, (list, tuple)) else [value, value]
            return len(sides) == 2 and all(
                type(side) is int and 1 <= side <= LARGEST_IMAGE for side in sides
            )

        value = self._get(key, default, "a size in pixels, or a height and a width", is_size)
        return (value, value) if isinstance(value, int) else (value[0], value[1])

    def triple(self, key: str, default: Triple, low: float = -1e6) -> Triple:
        """Three numbers, or one for all."""

        def is_triple(value: Any) -> bool:
            values = value if isinstance(value, (list, tuple)) else [value] * 3
            return len(values) == 3 and all(_is_number(x) and low <= x <= 1e6 for x in values)

        value = self._get(key, default, "three numbers", is_triple)
        first, second, third = value if isinstance(value, (list, tuple)) else [value] * 3
        return float(first), float(second), float(third)

    def list_of(self, key: str, kind: type[T]) -> list[T]:
        """A list of such values; empty where there is none."""

        def is_list(value: Any) -> bool:
            return isinstance(value, list) and all(type(item) is kind for item in value)

        return list(self._get(key, [], f"a list of {kind.__name__}", is_list))

    def object(self, key: str) -> ForeignJson:
        """An object; an empty one where there is none."""
        value = self._get(key, {}, "an object", lambda v: isinstance(v, dict))
        return ForeignJson(value, self.where, f"{self.path}{key}.")

    def _get(self, key: str, default: Any, wanted: str, is_right: Callable[[Any], bool]) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if not is_right(value):
            self.refuse(key, wanted)
        return value


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


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
