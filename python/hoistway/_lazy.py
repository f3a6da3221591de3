"""Attributes that are found out when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801
    """Like `functools.cached_property`, without the lock that this has before Python 3.12: it is one for all objects of
    a class, and a child of `fork` would wait for ever for a thread of its parent. Threads that ask at once may each
    compute the value; all of them get the same one.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = ""
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> lazy[T]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> lazy[T] | T:
        if instance is None:
            return self
        # Not called again: what lies in the dictionary goes before what has no `__set__`.
        value: T = instance.__dict__.setdefault(self._name, self._compute(instance))
        return value
