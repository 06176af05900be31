# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The thread-local modes of torch that a call inherits: gradient, inference, autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ThreadModes:
    """The modes of a thread that change what torch operations return.

    A preprocessor of the user's runs inside the model's step, so it inherits these modes. When
    its forward runs ahead, it has to run under the very same ones, and its result may be used
    only where they still hold.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def current(cls, device: torch.device) -> ThreadModes:
        """Read the modes of the calling thread.

        Args:
            device (torch.device): The device whose autocast state counts beside the CPU's.

        Returns:
            ThreadModes: The modes.
        """
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in sorted({'cpu', device.type})
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the calling thread has these modes."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled, cache_enabled=self.autocast_cache)
                )
            yield
