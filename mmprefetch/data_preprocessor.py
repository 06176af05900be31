# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The preprocessor that begins work on batches early and hands it out when the model asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import MODELS
from torch import nn

from .binding import FieldSource, resolve
from .classes import find_class, nearest, preprocessor_names
from .families import Family, announce, cast, family_of
from .families.fused import twin
from .mixed import PartConstants, SampleConstants
from .ownership import own_memory
from .staging import stage
from .tickets import Result, Runtime, Staged, Ticket
from .watch import Watch
from .wrapping import WrappingPreprocessor


@MODELS.register_module()
class PrefetchDataPreprocessor(WrappingPreprocessor):
    """Wraps any data preprocessor; begins its work on batches ahead of the model's step.

    :meth:`prefetch` begins work on a batch. A later call with that very object waits for the work
    on the compute stream, and returns its result. A batch that nobody began is processed at once.

    Args:
        wraps (str): Registered name of the preprocessor to wrap. Defaults to
            'ImgDataPreprocessor'.
        prefetch_safe (bool): Declares that the forward of the wrapped preprocessor depends on its
            batch alone (no random numbers, no collectives, no iteration), so that the whole of it
            may run ahead. Not needed for the classes that mmprefetch knows. Defaults to False.
        **fields: The wrapped preprocessor's own arguments.

    Raises:
        ValueError: ``wraps`` is not registered, or a field is not one of the wrapped class's, or
            fields do not fit each other.
    """

    _OWN = WrappingPreprocessor._OWN | {
        *('fields', 'opted_in', 'prefetch_safe', 'split', 'bindings', '_mixed', '_runtime')
    }

    def __init__(
        self, wraps: str = 'ImgDataPreprocessor', prefetch_safe: bool = False, **fields: Any
    ) -> None:
        cls = find_wrapped(wraps)
        fields = resolve('model', cls, [FieldSource('model.data_preprocessor', fields)]).fields
        self._set_up(build(cls, fields), fields, prefetch_safe, opted_in=True)

    @classmethod
    def around(cls, module: nn.Module, fields: dict | None = None) -> PrefetchDataPreprocessor:
        """Wrap a preprocessor that exists already, and change nothing about it.

        Args:
            module (nn.Module): The preprocessor.
            fields (dict, optional): The arguments it was built from, where known.

        Returns:
            PrefetchDataPreprocessor: The wrapper.
        """
        self = cls.__new__(cls)
        self._set_up(module, dict(fields or {}), prefetch_safe=False, opted_in=False)
        return self

    def _set_up(
        self, wrapped: nn.Module, fields: dict, prefetch_safe: bool, opted_in: bool
    ) -> None:
        nn.Module.__init__(self)
        self.fields = fields
        self.opted_in = opted_in
        self.prefetch_safe = prefetch_safe
        self.split: str | None = None
        self.bindings: dict[str, Any] = {}
        self._mixed: dict[str, PartConstants] = {}
        self._runtime = Runtime()
        self._wrap(wrapped)
        if not prefetch_safe:
            announce(wrapped)

    def _split_now(self, training: bool) -> str | None:
        """The split that a batch belongs to which nobody began. Outside of any loop, for example
        when a trained model is tried by hand, the flag tells the most likely one."""
        if self.split is not None:
            return self.split
        likely = ('train',) if training else ('test', 'val', 'train')
        return next((split for split in likely if split in self.bindings), None)

    def is_mixed(self, split: str) -> bool:
        """Whether the datasets of a split differ in what their samples are normalised with.

        Args:
            split (str): 'train', 'val' or 'test'.

        Returns:
            bool: Whether they do.
        """
        return split in self._mixed

    def mix(self, split: str, constants: PartConstants) -> None:
        """Let each sample of a split be normalised with what its own dataset says.

        Args:
            split (str): 'train', 'val' or 'test'.
            constants (PartConstants): What each of the split's datasets says.
        """
        self._mixed[split] = constants

    # -- look-ahead ---------------------------------------------------------------------------

    @property
    def compute_on_host(self) -> bool:
        """bool: Whether the model's step runs on the calling thread."""
        return self._runtime.stream(self.device).compute_on_host

    def stage(
        self, batch: Any, split: str, depth: int, parts: Sequence[int] | None = None
    ) -> Staged:
        """Make a batch ready for its transfer, on the thread that loaded it.

        Args:
            batch (Any): A batch from the dataloader.
            split (str): The split it belongs to.
            depth (int): Batches that may be in flight at a time.
            parts (Sequence[int], optional): Of a mixed dataset, the part that each sample is from.

        Returns:
            Staged: To be given to :meth:`prefetch`.
        """
        staged = Staged(Watch(batch))
        if parts is not None:
            staged.samples = self._mixed[split].of(parts)
        # A module that is no preprocessor of mmengine's kind may want its input on the host.
        if not self.compute_on_host and isinstance(self.of_split(split), BaseDataPreprocessor):
            ring = self._runtime.ring(split, depth + 2)
            constants = None if staged.samples is None else staged.samples.values
            staged.packed = stage((batch, constants), self.device, ring)
        return staged

    def prefetch(
        self, batch: Any, training: bool, split: str = 'train', staged: Staged | None = None
    ) -> None:
        """Begin work on a batch.

        Args:
            batch (Any): A batch from the dataloader. The object itself is the ticket.
            training (bool): What the model is going to pass as ``training``.
            split (str): Whose effective preprocessor is used.
            staged (Staged, optional): What :meth:`stage` returned for the batch.
        """
        module = self.of_split(split)
        family = _family(module)
        device = self.device
        runtime = self._runtime
        staged = staged or Staged(Watch(batch))
        packed, samples = staged.packed, staged.samples
        ambient = None
        if family is None and self.prefetch_safe:
            ambient = runtime.expected_ambient(split, device)
        # Before the work is begun: a field may change at any time from here on.
        # A mere transfer does not depend on them.
        generation = (
            None
            if family is None and ambient is None
            else runtime.check(module, family is not None)
        )
        stream = runtime.stream(device)
        runtime.follow(stream)

        def prepare() -> Result:
            own = samples
            if packed is not None:
                (moved, constants), blocks = packed.deliver()
                if own is not None:
                    own = SampleConstants(constants, own.reverse)
            elif family is not None:
                # Containers of its own, so that what is put into them does not show in the
                # caller's batch before that is due.
                moved, blocks = cast(BaseDataPreprocessor(), batch), []
            elif ambient is not None:
                # Memory of its own as well: a user's forward may work in place.
                moved, blocks = own_memory(batch), []
            else:
                moved, blocks = batch, []
            if family is not None:
                begun = family.begin(_with_samples(module, own), moved, training)
                return Result(begun, blocks, family.made(begun))
            if ambient is not None:
                with ambient.applied():
                    value = module(moved, training)
                return Result(value, blocks, value)
            return Result(moved, blocks)

        work = stream.submit(prepare)
        if packed is not None and packed.lease is not None:
            packed.lease.copied(work.barrier())
        runtime.add(
            Ticket(batch, staged.watch, split, training, work, family, ambient, generation, samples)
        )

    def remember(self, batch: Any, split: str, staged: Staged) -> None:
        """Keep what was noted of a batch, to be used when the model asks for it.

        Args:
            batch (Any): A batch from the dataloader.
            split (str): Whose effective preprocessor is used.
            staged (Staged): What :meth:`stage` returned for the batch.
        """
        self._runtime.add(Ticket(batch, staged.watch, split, samples=staged.samples))

    def discard(self, batch: Any) -> bool:
        """Drop the work begun on a batch.

        Args:
            batch (Any): The batch.

        Returns:
            bool: Whether there was any that nobody had asked for.
        """
        return self._runtime.take(batch) is not None

    def close(self) -> None:
        """Give the stream's thread back. The preprocessor may go on being used."""
        self._runtime.close()

    # -- the model's side -----------------------------------------------------------------------

    def forward(self, data: Any, training: bool = False) -> Any:
        """Preprocess a batch, or hand out what was begun on it.

        Args:
            data (Any): A batch from the dataloader.
            training (bool): Whether to preprocess for training.

        Returns:
            Any: What the wrapped preprocessor returns.
        """
        ticket = self._runtime.take(data)
        if ticket is None:
            split = self._split_now(training)
            if split in self._mixed:
                raise ValueError(
                    f'{split}_dataloader holds datasets that differ in mean, std or channel order, '
                    f'so its batches have to come through a prefetch loop: write '
                    f"`{split}_cfg.type='Prefetch{split.capitalize()}Loop'` (for training "
                    "'PrefetchLoop')."
                )
            return self._process(self.of_split(split), data, training)
        module = _with_samples(self.of_split(ticket.split), ticket.samples)
        family = _family(module)
        if (
            ticket.work is None
            or ticket.family is not family
            or ticket.watch.changed()
            or not self._is_current(ticket)
        ):
            return self._process(module, data, training)
        if family is not None and ticket.training != training and not family.trains_alike:
            return self._process(module, data, training)
        result = ticket.work.wait(Result.used)
        if family is not None:
            return family.finish(module, result.value, data, training)
        if self.prefetch_safe:
            ambient = self._runtime.note_ambient(ticket.split, self.device)
            if ticket.ambient == ambient and ticket.training == training:
                return result.value
            return self._process(module, data, training)
        return module(result.value, training)

    def _is_current(self, ticket: Ticket) -> bool:
        """Whether the fields are still those that a ticket's work was begun with."""
        if ticket.generation is None:
            return True
        module = self.of_split(ticket.split)
        return ticket.generation == self._runtime.check(module, ticket.family is not None)

    def _process(self, module: nn.Module, data: Any, training: bool) -> Any:
        family = _family(module)
        if family is None:
            return module(data, training)
        return family.run(module, data, training)

    def _changed(self) -> None:
        self._runtime.change()

    def extra_repr(self) -> str:
        return f'wraps={type(self.wrapped).__name__}, fields={self.fields}'


def _family(module: nn.Module) -> Family | None:
    """What is known of a preprocessor; nothing where someone has replaced its forward."""
    return None if 'forward' in vars(module) else family_of(type(module))


def _with_samples(module: nn.Module, samples: SampleConstants | None) -> nn.Module:
    return module if samples is None else twin(module, {'_samples': samples})


def find_wrapped(name: Any, scope: str | None = None) -> type[nn.Module]:
    """Look the class up that a preprocessor is to wrap.

    Args:
        name (str | type): Registered name, or the class itself.
        scope (str, optional): The registry scope to look in first.

    Returns:
        type: The class.

    Raises:
        ValueError: No such class is registered.
    """
    cls = find_class(MODELS, name, scope)
    if cls is None:
        known = [n for n in preprocessor_names(MODELS, scope) if not n.startswith('Prefetch')]
        raise ValueError(
            f"model.data_preprocessor.wraps='{name}' is not a registered preprocessor"
            f'{nearest(name, known)}. Registered are: {", ".join(known)}. If it belongs to a '
            "package, add that package to `custom_imports` or write `wraps='package.Name'`."
        )
    ours = PrefetchDataPreprocessor
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)) or issubclass(
        cls, (BaseModel, ours)
    ):
        raise ValueError(
            f'model.data_preprocessor.wraps={name!r} is {cls!r}, which is no preprocessor that '
            "could be wrapped. Write the name of one, for example `wraps='ImgDataPreprocessor'`."
        )
    return cls


def build(cls: type[nn.Module], fields: dict) -> nn.Module:
    """Build a preprocessor from its class and fields.

    Args:
        cls (type): The preprocessor's class.
        fields (dict): Its arguments.

    Returns:
        nn.Module: The preprocessor.
    """
    family = family_of(cls)
    return family.make(cls, fields) if family is not None else cls(**fields)
