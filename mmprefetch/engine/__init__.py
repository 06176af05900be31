# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""A batch's road from the dataloader to the model: load, transfer, begin, collect.

:mod:`.loader` stands in for a dataloader. Each :mod:`.iteration` over it has a :mod:`.thread` that
loads, and a :mod:`.preparation` that transfers each batch (:mod:`.layout`, :mod:`.transfer`) and
begins its preprocessing on a side stream (:mod:`.streams`). The :mod:`.ticket` carries the work to
the main thread, where the preprocessor collects it if nothing has changed since
(:mod:`.snapshot`, :mod:`.thread_modes`).
"""

from .loader import LookAheadLoader
from .preparation import Preparation
from .thread_modes import ThreadModes
from .ticket import Call, Runtime, Ticket

__all__ = ['Call', 'LookAheadLoader', 'Preparation', 'Runtime', 'ThreadModes', 'Ticket']
