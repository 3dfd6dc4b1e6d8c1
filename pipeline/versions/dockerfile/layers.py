"""What names mean in a stage, over what they mean in the stage that it is built from; the latter is never copied."""

from __future__ import annotations

from typing import Protocol

_DEEPEST = 256  # layers; then they become one, so that neither looking nor copying grows with the square of a file


class Known(Protocol):
    """Whatever can say what a name means."""

    def get(self, name: str, /) -> str | None:
        """The value of a name, None where it has none."""


class Layers:
    """Names and values of one stage, and below them those of its bases, which change no more."""

    __slots__ = ("below", "own")

    def __init__(self, below: tuple[dict[str, str], ...] = ()) -> None:
        self.own: dict[str, str] = {}
        self.below = below

    def get(self, name: str, /) -> str | None:
        """The value of a name, the nearest first."""
        value = self.own.get(name)
        if value is None:
            value = next((layer[name] for layer in self.below if name in layer), None)
        return value

    def child(self) -> Layers:
        """What a stage built from this one begins with."""
        if len(self.below) < _DEEPEST:
            return Layers((self.own, *self.below))
        whole: dict[str, str] = {}
        for layer in reversed((self.own, *self.below)):
            whole |= layer
        return Layers((whole,))


class Scope:
    """The names of a stage while it is read: ARG and ENV, the later one wins, and what its image keeps, the ENVs.

    An ENV of a base wins over an ARG of the same name there.
    """

    __slots__ = ("env", "set_here")

    def __init__(self, env: Layers, set_here: Layers) -> None:
        self.env = env
        self.set_here = set_here

    def get(self, name: str, /) -> str | None:
        """The value of a name."""
        for values in (self.set_here.own, self.env, self.set_here):
            value = values.get(name)
            if value is not None:
                return value
        return None

    def arg(self, name: str, value: str) -> None:
        """An ARG."""
        self.set_here.own[name] = value

    def environment(self, name: str, value: str) -> None:
        """An ENV."""
        self.set_here.own[name] = self.env.own[name] = value

    def child(self) -> Scope:
        """What a stage built from this one begins with."""
        return Scope(self.env.child(), self.set_here.child())

    def image(self) -> Scope:
        """What an image built on this one begins with: it knows no ARG of it."""
        return Scope(self.env.child(), Layers())
