"""A device that computes nothing: tensors there have shapes and no values, and what would reach a GPU is counted.

It is torch's placeholder for devices of others (torch 2.10 or newer), with shapes by `FakeTensorMode`. Tensors on the
host are real. So a loop that trains on a GPU runs here with the same calls, on any machine, and operations that mix
devices raise.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretended"


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend(NAME, _Module())
DEVICE = torch.device(NAME, 0)

# Neither views nor these start a kernel.
_FREE = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "detach",
    "alias",
    "_unsafe_view",
    "_reshape_alias",
    "device",
}


@torch.library.custom_op(f"{NAME}::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One kernel, as on a GPU."""
    raise NotImplementedError


@torch.library.custom_op(f"{NAME}::attention_backward", mutates_args=())
def attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


attention.register_fake(lambda q, k, v: torch.empty_like(q))
attention_backward.register_fake(lambda grad, *inputs: tuple(map(torch.empty_like, inputs)))
attention.register_autograd(
    lambda ctx, grad: attention_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class _Functions(TorchFunctionMode):
    """Attention as one kernel, and new tensors by way of the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention and args[0].device == DEVICE:
            return attention(*args[:3])
        if func is torch.tensor and kwargs and kwargs.get("device") == DEVICE:
            return torch.tensor(*args, **kwargs | {"device": None}).to(DEVICE)
        return func(*args, **(kwargs or {}))


class Pretended(TorchDispatchMode):
    """Within, tensors may be on DEVICE.

    Attributes:
        launches: how many operations reached the device, by name; copies from the host among them.
        waits: how often the host asked for values, by name; it is given zeros. What has as many rows as there are
            values that hold (`nonzero`, a mask as an index) raises torch's DynamicOutputShapeException.
        from_host: how many operations read tensors of the host; numbers do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.waits = Counter[str](), Counter[str]()
        self.from_host = 0
        self._fake, self._functions = FakeTensorMode(), _Functions()
        # Transformers looks at no values of tensors that it knows to be fake.
        self._values = patch("transformers.utils.import_utils.is_fake_tensor", lambda tensor: False)

    def __enter__(self) -> Pretended:
        self._functions.__enter__()
        self._values.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._values.stop()
        self._functions.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        wanted = kwargs.get("device")
        if not given and (wanted is None or torch.device(wanted).type != NAME):
            return func(*args, **kwargs)  # on the host
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.waits[name] += 1
            return torch.zeros((), dtype=args[0].dtype).item()
        if (wanted is not None and torch.device(wanted).type != NAME) or (
            name == "copy_" and not isinstance(args[0], FakeTensor)
        ):
            self.waits[name] += 1
            return torch.zeros(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        hosts = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        self.from_host += any(not isinstance(leaf, FakeTensor) for leaf in hosts)
        args, kwargs = tree_map_only(Tensor, self._shape_of, (args, kwargs))
        with self._fake:
            result = func(*args, **kwargs)
        if not (func.is_view or name in _FREE):
            self.launches[name] += 1
        return result

    def counted(self) -> tuple[int, int]:
        """Launches and waits since this was called last."""
        counts = self.launches.total(), self.waits.total()
        self.launches.clear()
        self.waits.clear()
        return counts

    def _shape_of(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)


def moved(model: nn.Module) -> nn.Module:
    """The model on DEVICE; within `Pretended`."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    moved_tensor = tensor.detach().to(DEVICE)
                    kept = (
                        nn.Parameter(moved_tensor, tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else moved_tensor
                    )
                    tensors[name] = kept  # type: ignore[assignment]
    return model
