"""A function and its arguments as one parcel: what is shipped by value, what by reference, and what cannot be shipped.

By reference: whatever a worker can import, since it gets this process's module path and folder. By value: ``__main__``,
notebook cells, local functions and classes, and modules that cannot be imported by name.
"""

from __future__ import annotations

import functools
import importlib.machinery
import inspect
import logging
import os
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle

from distsdk.errors import ShipError
from distsdk.wire.culprit import culprit, global_names, variables_of
from distsdk.wire.memory import seal
from distsdk.wire.messages import Parcel
from distsdk.wire.pickling import Pickler, Reducer, dump
from distsdk.worker.settings import captured_settings

LARGE_BYTES = 64 << 20
"""A call that ships more than this logs which variables it is made of."""
_log = logging.getLogger("distsdk")
_by_value_lock = threading.Lock()


class Home:
    """The driver's own classes and functions that were shipped by value, by number."""

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self._seen: set[int] = set()

    def note(self, obj: Any) -> None:
        """Give `obj` a number."""
        if id(obj) not in self._seen:
            self._seen.add(id(obj))
            self.objects[len(self.objects)] = obj

    def __reduce__(self) -> tuple[Any, ...]:
        """As the dict itself: pickled last, when it is complete, so its values are references to what came before."""
        return dict, (), None, None, iter(self.objects.items())


def ship(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Parcel, list[int], Mapping[int, Any]]:
    """Pack a call: parcel, descriptors to attach (the caller closes them), and the home objects by number.

    Raises ShipError naming the variable and type of what does not pickle.
    """
    home = Home()
    try:
        parts = dump_call((captured_settings(), fn, args, dict(kwargs), home), home)
    except Exception as error:
        raise _explained(fn, args, kwargs, error) from error
    parcel, descriptors = seal(parts)
    if parcel.size > LARGE_BYTES:
        largest = sorted(sizes(fn, args, kwargs).items(), key=lambda item: -item[1])[:5]
        named = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in largest if size > LARGE_BYTES / 64)
        _log.warning("%s ships %.0f MB to the workers, out of band: %s", name_of(fn), parcel.size / 1e6, named)
    return parcel, descriptors, home.objects


def dump_call(obj: Any, home: Home | None = None) -> list[memoryview]:
    """The parts of a parcel for `obj`, pickled as calls are."""
    home = home or Home()
    with _unimportable_by_value() as local_modules:
        owners = shared_owners(local_modules)
        reducers = _tensor_reducers()
        return dump(obj, lambda file, buffers: CallPickler(file, buffers, reducers, home, owners))


def _tensor_reducers() -> Sequence[Reducer]:
    if "torch" not in sys.modules:  # then there is no tensor either
        return ()
    from distsdk.worker.tensors import loader_reducer, storage_reducer

    return storage_reducer, loader_reducer


class CallPickler(Pickler):
    """Notes what goes by value, and keeps module state shared (see `SharedGlobal`)."""

    def __init__(
        self, file: Any, buffers: list[memoryview], reducers: Sequence[Reducer], home: Home, owners: Mapping[int, str]
    ) -> None:
        super().__init__(file, buffers, reducers)
        self._home, self._owners = home, owners

    def reducer_override(self, obj: Any) -> Any:
        """As the base does; what it reduces by value is noted."""
        if type(obj) is _CACHED and _is_hidden(obj):
            return functools.lru_cache(**obj.cache_parameters()), (obj.__wrapped__,)
        reduced = super().reducer_override(obj)
        if isinstance(obj, (type, types.FunctionType)) and isinstance(reduced, tuple) and len(reduced) > 2:
            self._home.note(obj)
        return reduced

    def _dynamic_function_reduce(self, func: Any) -> Any:
        reduced = super()._dynamic_function_reduce(func)
        variables = reduced[2][1]["__globals__"]
        for name in global_names(func.__code__):  # cloudpickle misses those of class bodies
            if name in func.__globals__:
                variables.setdefault(name, func.__globals__[name])
        for name, value in variables.items():
            if id(value) in self._owners:
                variables[name] = SharedGlobal(self._owners[id(value)], value)
        return reduced


_CACHED = type(functools.lru_cache(len))


def _is_hidden(obj: Any) -> bool:
    """True when the name under which `obj` would be looked up gives something else: a decorator is around it."""
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not obj or obj.__module__ == "__main__"


class SharedGlobal:
    """A container that belongs to an importable module and is also a global of a function shipped by value.

    A copy would part the two: the function would fill its copy while the module's own code reads the original. So the
    worker takes the module's object and gives it the content that the driver's has now.
    """

    def __init__(self, owner: str, value: Any) -> None:
        self._owner, self._value = owner, value

    def __reduce__(self) -> tuple[Any, ...]:
        """Load as the module's own object."""
        module, _, name = self._owner.rpartition(":")
        return take_shared, (module, name, type(self._value)(self._value))


def take_shared(module: str, name: str, content: Any) -> Any:
    """The object `name` of `module`, with `content` (called in the worker by ``pickle``)."""
    owned = getattr(importlib.import_module(module), name)
    if isinstance(owned, list):
        owned[:] = content
    else:
        owned.clear()
        owned.update(content)
    return owned


def shared_owners(modules: Sequence[types.ModuleType]) -> dict[int, str]:
    """Plain mutable containers that are globals of the user's importable modules: id to ``module:name``."""
    return {
        id(value): f"{module.__name__}:{name}"
        for module in modules
        for name, value in list(vars(module).items())
        if type(value) in (dict, list, set) and not name.startswith("__")
    }


@contextmanager
def _unimportable_by_value() -> Iterator[list[types.ModuleType]]:
    """Within it, cloudpickle ships modules that a worker cannot import by value; gives the user's importable ones."""
    importable, others = user_modules()
    with _by_value_lock:  # cloudpickle's registry belongs to the whole process
        mine = [module for module in others if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in mine:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield importable
        finally:
            for module in mine:
                cloudpickle.unregister_pickle_by_value(module)


def user_modules() -> tuple[list[types.ModuleType], list[types.ModuleType]]:
    """The loaded modules that are neither installed nor standard: those importable by name, and those not."""
    modules = [module for name, module in list(sys.modules.items()) if not _is_known_other(name, module)]
    importable = [module for module in modules if is_importable(module)]
    return importable, [module for module in modules if module not in importable]


_others: dict[str, int] = {}
"""Loaded modules that are not the user's, by name, with the object's id: there are thousands, and they stay."""


def _is_known_other(name: str, module: Any) -> bool:
    if _others.get(name) == id(module):
        return True
    if _is_users(name, module):
        return False
    _others[name] = id(module)
    return True


def _is_users(name: str, module: Any) -> bool:
    if not isinstance(module, types.ModuleType) or module.__name__ != name or name == "__main__":
        return False
    top = name.partition(".")[0]
    if top == "distsdk" or top in sys.stdlib_module_names:
        return False
    root = getattr(sys.modules.get(top), "__file__", None)
    file = getattr(module, "__file__", None)
    if root is None and file is None:  # made at run time; namespace packages and builtins have a spec
        return module.__spec__ is None and not hasattr(module, "__path__") and not name.startswith("_cython_")
    return not _is_installed(root or file) and not _is_installed(file or root)


@functools.cache
def _is_installed(file: str) -> bool:
    return file.startswith(_installed_places())


@functools.cache
def _installed_places() -> tuple[str, ...]:
    places = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    return tuple({os.path.join(place, "") for place in places if place not in (sys.prefix, sys.base_prefix)})


def is_importable(module: types.ModuleType) -> bool:
    """True when importing its name in a new process with this module path would give the same file.

    A module whose import is still under way is not: the worker's import would run into the very call that ships it.
    """
    if getattr(module.__spec__, "_initializing", False):
        return False
    path: Any = None
    origin: str | None = None
    parts = module.__name__.split(".")
    for depth in range(len(parts)):
        spec = _found_afresh(".".join(parts[: depth + 1]), path)
        if spec is None:
            return False
        path, origin = spec.submodule_search_locations, spec.origin
    file = getattr(module, "__file__", None)
    return origin is None or file is None or os.path.abspath(origin) == os.path.abspath(file)


def _found_afresh(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    """As a new interpreter would look for it: on the module path, or through an editable install's finder."""
    editable: list[Any] = [finder for finder in sys.meta_path if "editable" in str(getattr(finder, "__module__", ""))]
    finders: list[Any] = [importlib.machinery.PathFinder, *editable]
    for finder in finders:
        try:
            spec: importlib.machinery.ModuleSpec | None = finder.find_spec(name, path)
        except (ImportError, ValueError):
            continue
        if spec is not None:
            return spec
    return None


def name_of(fn: Any) -> str:
    """A name for any callable: its own, that of what it wraps, or its class's."""
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    if name.endswith("<lambda>") and hasattr(inner, "__code__"):
        return f"lambda-line-{inner.__code__.co_firstlineno}"
    return str(name.rpartition("<locals>.")[2])


def variables(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call ships, by the names that its author knows: parameters, captured variables, the bound object."""
    found: dict[str, Any] = {}
    inner = fn
    while isinstance(inner, functools.partial):
        found.update({f"partial argument {i}": arg for i, arg in enumerate(inner.args)})
        found.update(inner.keywords)
        inner = inner.func
    if getattr(inner, "__self__", None) is not None:
        found["self"] = inner.__self__
    elif not hasattr(inner, "__code__"):
        found["the callable itself"] = inner
    found.update(variables_of(getattr(inner, "__func__", inner)))
    try:
        found.update(inspect.signature(fn).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        found.update({f"argument {i}": arg for i, arg in enumerate(args)}, **kwargs)
    return found


def sizes(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that each variable of a call ships, on its own; -1 for one that does not pickle."""
    return {name: _size(value) for name, value in variables(fn, args, kwargs).items()}


def _size(value: Any) -> int:
    try:
        return sum(part.nbytes for part in dump_call(value))
    except Exception:
        return -1


def _explained(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> ShipError:
    """The error with the name of the variable, the function and the type."""
    for name, value in variables(fn, args, kwargs).items():
        found = culprit(name, value, dump_call)
        if found:
            path, part = found
            return ShipError(
                f"cannot ship {name!r} of {name_of(fn)} to the workers: {path} is a {type(part).__qualname__}, which "
                f"does not pickle ({_short(error)}). Make it inside the function, or pass what it is made from."
            )
    return ShipError(f"cannot ship {name_of(fn)} to the workers: {_short(error)}")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
