"""Idempotency keys: which one a call has, and what its arguments are known by.

Pure. Not who holds a key (``store/transitions/keys.py``) nor how a call says it
(``task``, ``recording``). A task has its calls' keys derived by ``lease_idempotency_key``:
``True`` is the digest of the arguments, a text is a template over them.
"""

from __future__ import annotations

import hashlib
import inspect
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Longest key kept as it is: the width of its column.
LONGEST_KEY = 255
_DIGEST = "sha256:"


@dataclass(frozen=True, slots=True)
class Underivable(ValueError):
    """Raised when a template cannot be filled from a call's arguments.

    Attributes:
        template: the template.
        reason: why, one line.
    """

    template: str
    reason: str

    def __str__(self) -> str:
        return f"no key can be made of {self.template!r}: {self.reason}"


def digest_of(serialised: bytes) -> str:
    """Return what serialised arguments are known by."""
    return _DIGEST + hashlib.sha256(serialised).hexdigest()


def checked_key(key: object) -> str:
    """Return a key as it is kept: as it is if every database keeps it so, else its digest.

    A key that is too long, has a NUL or a lone surrogate, or ends in white space (which MariaDB
    does not compare) is kept by its digest, so that two different keys are never one.

    Raises:
        TypeError: it is no text.
        ValueError: it is empty.
    """
    if not isinstance(key, str):
        message = f"an idempotency key is a str, not {type(key).__name__}: {key!r}"
        raise TypeError(message)
    if not key:
        message = "an idempotency key is not empty; leave it out for none"
        raise ValueError(message)
    encoded = key.encode("utf-8", "surrogatepass")
    plain = len(key) <= LONGEST_KEY and "\x00" not in key and key == key.rstrip()
    if plain and not any("\ud800" <= letter <= "\udfff" for letter in key):
        return key
    return digest_of(encoded)


def bound_arguments(
    run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments by their names: ``f(1)`` and ``f(x=1)`` are the same call.

    An argument left to its default is not among them; a template finds it. What does not fit the
    signature is kept under ``args`` and ``kwargs``: Celery, or the body, says that it does not.
    """
    try:
        signature = inspect.signature(run)
        return _Arguments(signature.bind(*args, **kwargs).arguments, signature)
    except (TypeError, ValueError):
        return _Arguments({"args": list(args), "kwargs": dict(kwargs)})


class _Arguments(dict[str, Any]):
    """A call's arguments by name; what is not among them is looked up for a template."""

    def __init__(
        self, named: Mapping[str, Any], signature: inspect.Signature | None = None
    ) -> None:
        super().__init__(named)
        self._signature = signature

    def __missing__(self, name: str) -> Any:
        for parameter in self._signature.parameters.values() if self._signature else ():
            if parameter.kind is parameter.VAR_KEYWORD and name in self.get(parameter.name, ()):
                return self[parameter.name][name]
            if parameter.name == name and parameter.default is not parameter.empty:
                return parameter.default
        raise _NoArgument(name)


class _NoArgument(LookupError):
    """Raised when a call has no argument of a name, nor a default for it."""


def derived_key(arguments: Mapping[str, Any], digest: str, *, rule: bool | str) -> str | None:
    """Return the key that a task's rule makes of a call; None without a rule.

    Args:
        arguments: ``bound_arguments``.
        digest: ``digest_of`` the serialised arguments.
        rule: ``lease_idempotency_key``.

    Raises:
        Underivable: the template asks for what the arguments do not have.
    """
    if isinstance(rule, str):
        try:
            return checked_key(rule.format_map(arguments))
        except _NoArgument as error:
            reason = (
                f"the call has no argument {error.args[0]!r}, which has no default: give it, "
                "or take it out of lease_idempotency_key"
            )
            raise Underivable(rule, reason) from error
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise Underivable(rule, f"{type(error).__name__}: {error}") from error
    return digest if rule else None


def template_problem(template: str) -> str | None:
    """Say why a text cannot be a template of keys; None when it can."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template)]
    except ValueError as error:
        return str(error)
    if not template:
        return "it is empty"
    # "{}" and "{0}": arguments have names, whichever way they are given.
    if any(field is not None and not field[:1].isidentifier() for field in fields):
        return "its fields are names of arguments, such as {order_id}"
    return None


def unknown_fields(template: str, run: Callable[..., Any]) -> list[str]:
    """Return the fields of a template that a function has no argument for."""
    parameters = inspect.signature(run).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return []
    names = {p.name for p in parameters}
    fields = [field for _, field, _, _ in string.Formatter().parse(template) if field]
    firsts = [field.partition(".")[0].partition("[")[0] for field in fields]
    return [name for name in firsts if name not in names]
