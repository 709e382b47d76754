"""JSON configurations of other programs, whose values are checked where they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from vitcli.config import Size
from vitcli.data.files import open_file
from vitcli.errors import CheckpointError
from vitcli.resnets import LARGEST_IMAGE
from vitcli.typed_json import from_json, parse

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
        return int(self._get(int, key, default, wanted, low, high))

    def number(
        self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e6
    ) -> float:
        """A number in [low, high]."""
        wanted = f"a number from {low:g} to {high:g}"
        return float(self._get(float, key, default, wanted, low, high))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self._get(bool, key, default, "true or false"))

    def word(self, key: str, choices: Mapping[Any, T], default: Any = None) -> T:
        """What a word (or a number) stands for."""
        wanted = f"one of {', '.join(map(str, choices))}"
        value = self._get(str | int, key, default, wanted)
        if value not in choices:
            self.refuse(key, wanted)
        return choices[value]

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        return str(self._get(str, key, default, "a string"))

    def size(self, key: str, default: Size | None = None) -> Size:
        """Height and width: a whole number, or two."""
        wanted = "a size in pixels, or a height and a width"
        kind = int | tuple[int, int]
        found = self._get(kind, key, default and list(default), wanted, 1, LARGEST_IMAGE)
        return (found, found) if isinstance(found, int) else found

    def triple(self, key: str, default: Triple, low: float = -1e6) -> Triple:
        """Three numbers, or one for all."""
        found = self._get(float | Triple, key, list(default), "three numbers", low, 1e6)
        return found if isinstance(found, tuple) else (found, found, found)

    def list_of(self, key: str, kind: type[T]) -> list[T]:
        """A list of such values; empty where there is none."""
        return list(self._get(list[kind], key, [], f"a list of {kind.__name__}"))  # type: ignore[valid-type]

    def object(self, key: str) -> ForeignJson:
        """An object; an empty one where there is none."""
        value = self._get(dict[str, Any], key, {}, "an object")
        return ForeignJson(value, self.where, f"{self.path}{key}.")

    def _get(
        self,
        kind: Any,
        key: str,
        default: Any,
        wanted: str,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> Any:
        value = self.values.get(key)
        try:
            found = from_json(kind, default if value is None else value)
        except ValueError:
            self.refuse(key, wanted)
        for number in found if isinstance(found, tuple) else (found,):
            if isinstance(number, int | float) and not low <= number <= high:
                self.refuse(key, wanted)
        return found


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
