"""Record what a function computes as one list of calls with prepared arguments.

The forward pass of a large model calls hundreds of modules, which choose kernels, make views and
convert arguments. Where maps are small, that takes as long as the products. A recording keeps only
the calls of PyTorch's operators and of the compiled kernels, as CUDA graphs do on a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_unflatten


class CannotRecordError(Exception):
    """The function did something that a list of calls cannot repeat."""


class _Part(NamedTuple):
    """A tensor that is stored in a result: in that of an earlier call, or in the input."""

    result: str
    offset: int  # from the first element of the result
    view: str  # the Python expression of the tensor


class _Owner(NamedTuple):
    """The result of an earlier call, or the input, without its memory."""

    result: str
    storage: StorageWeakRef  # keeps the address of the storage from being used again
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Line(NamedTuple):
    """A line of the recorded function."""

    result: str | None
    expression: str
    uses: set[str]  # the results that it reads or writes


def current_recorder() -> "Recorder | None":
    """Return the recorder that sees the operators of this thread, or None."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return None
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Recorder) else None


class Recorder(TorchDispatchMode):
    """Inside this context all operators and compiled kernels are noted and computed.

    What does not depend on the input is computed once and becomes a constant, but for random
    numbers. A view becomes an expression in the arguments of the calls that read it.

    Example:
        >>> import torch
        >>> from lipsformer.kernels.recording import Recorder
        >>> x = torch.ones(2, 3)
        >>> with torch.no_grad(), Recorder(x) as recorder:
        ...     y = (x + 1).t().mean(1)
        >>> recorder.function(y)(torch.zeros(2, 3))
        tensor([1., 1., 1.])
    """

    def __init__(self, x: Tensor) -> None:
        """Start.

        Args:
            x: The only input. The recorded function takes inputs of its shape, strides and type.
        """
        super().__init__()
        self._lines: list[_Line] = []
        self._names: dict[str, Any] = {"threads": torch.get_num_threads}
        self._owners: dict[int, _Owner] = {}  # by the address of the storage
        self._note_owner(x, "x")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute an operator and note it.

        Raises:
            CannotRecordError: If it makes a number of a tensor that depends on the input, if the
                shape of its result does, if its result is sparse, if it gives a tensor another
                size, or if it writes to a tensor that no recorded call makes. Nothing has been
                written then but results of recorded calls.
        """
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        written = _written(func, args, kwargs) if func._schema.is_mutable else []
        if any(self._part(x) is None for x in written):
            raise CannotRecordError(f"{func} writes to a tensor that outlives the call")
        sizes = [x.size() for x in written]
        result = func(*args, **kwargs)
        if [x.size() for x in written] != sizes:
            raise CannotRecordError(f"{func} gives a tensor another size")
        outputs = _tensors(result)
        # Uninitialized memory is filled later, and a random number is another in every call.
        varies = "empty" in func._schema.name or torch.Tag.nondeterministic_seeded in func.tags
        if not varies and all(self._part(tensor) is None for tensor in inputs):
            return result
        if not outputs:
            raise CannotRecordError(f"{func} makes a number of a tensor")
        if torch.Tag.dynamic_output_shape in func.tags:
            raise CannotRecordError(f"the shape of the result of {func} depends on its input")
        if any(tensor.layout != torch.strided for tensor in outputs):
            raise CannotRecordError(f"the result of {func} is sparse")
        if not func._schema.is_mutable and all(self._part(x) is not None for x in outputs):
            return result  # views
        uses: set[str] = set()
        if "empty" in func._schema.name:  # by the function that is called in the shortest time
            func, args = torch.empty_strided, (list(result.shape), list(result.stride()))
            kwargs = {"dtype": result.dtype, "device": result.device}
        given = [self._source(value, uses) for value in args]
        given += [f"{name}={self._source(value, uses)}" for name, value in kwargs.items()]
        name = f"t{len(self._lines)}"
        self._lines.append(_Line(name, f"{self._constant(func)}({', '.join(given)})", uses))
        if isinstance(result, Tensor):
            self._note_owner(result, name)
        else:
            for i, output in enumerate(result):
                self._note_owner(output, f"{name}[{i}]")
        return result

    def kernel(self, function: Any, args: Sequence[Any]) -> None:
        """Note a call of a compiled kernel.

        Args:
            function: The kernel, with addresses in place of tensors.
            args: All arguments but the number of threads, which comes last: tensors, numbers, None.
        """
        uses: set[str] = set()
        given = [self._pointer(value, uses) for value in args]
        call = f"{self._constant(function)}({', '.join(given)}, threads())"
        self._lines.append(_Line(None, call, uses))

    def function(self, result: Any) -> Callable[[Tensor], Any]:
        """Return the function of the input that repeats all calls.

        Args:
            result: What the calls computed: a tensor, or lists, tuples and dictionaries of tensors.
        """
        leaves, structure = tree_flatten(result)
        uses: set[str] = set()
        last = _Line(None, f"return {self._source(leaves, uses)}", uses)
        source: list[str] = []
        needed: set[str] = set()
        for line in reversed([*self._lines, last]):
            done = line.uses - needed - {"x"}  # this line is the last one that uses them
            needed |= line.uses
            if done and line is not last:
                source.append(f"    {' = '.join(sorted(done))} = None")
            target = f"{line.result} = " if line.result in needed else ""
            source.append(f"    {target}{line.expression}")
        code = "\n".join(["def recorded(x):", *reversed(source)])
        names = dict(self._names)
        exec(code, names)
        recorded = names["recorded"]
        return lambda x: tree_unflatten(recorded(x), structure)

    def _note_owner(self, tensor: Any, name: str) -> None:
        """Note that a result holds the memory of a tensor, unless an earlier one does."""
        if isinstance(tensor, Tensor) and self._part(tensor) is None:
            storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
            self._owners[storage._cdata] = _Owner(
                name, StorageWeakRef(storage), tensor.dtype, tensor.size(), tensor.stride(), offset
            )

    def _part(self, tensor: Tensor) -> _Part | None:
        """Return where a tensor is stored, None for a constant."""
        if tensor.layout != torch.strided:  # a weight in oneDNN's layout
            return None
        owner = self._owners.get(tensor.untyped_storage()._cdata)
        if owner is None:
            return None
        name = owner.result
        if tensor.dtype != owner.dtype:
            raise CannotRecordError("a view has another type than its tensor")
        offset = int(tensor.storage_offset()) - owner.offset
        if (tensor.size(), tensor.stride(), offset) == (owner.size, owner.stride, 0):
            return _Part(name, 0, name)
        geometry = f"{tuple(tensor.size())}, {tensor.stride()}, {name}.storage_offset() + {offset}"
        return _Part(name, offset, f"{name}.as_strided({geometry})")

    def _source(self, value: Any, uses: set[str]) -> str:
        """Return the Python expression of an argument, and add what it uses."""
        if isinstance(value, Tensor) and (part := self._part(value)) is not None:
            uses.add(part.result.partition("[")[0])
            return part.view
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._source(entry, uses) for entry in value)}]"
        return repr(value) if isinstance(value, (int, str)) else self._constant(value)

    def _pointer(self, value: Any, uses: set[str]) -> str:
        """Return the expression of a kernel's argument, which takes a tensor's address."""
        if not isinstance(value, Tensor):
            return self._constant(value)
        part = self._part(value)
        if part is None:
            self._constant(value)  # keeps the tensor
            return repr(value.data_ptr())
        uses.add(part.result.partition("[")[0])
        return f"{part.result}.data_ptr() + {part.offset * value.itemsize}"

    def _constant(self, value: Any) -> str:
        """Give a name to a value that is the same in all calls."""
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to."""
    arguments = func._schema.arguments
    given = {
        argument.name: value for argument, value in zip(arguments, args, strict=False)
    } | kwargs
    return _tensors(
        [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
    )


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]
